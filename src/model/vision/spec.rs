//! The description of a tower as data: its sizes, and its tensors. An architecture's folder produces it from a config.

use crate::kernels::{HiddenAct, PixelScale};
use crate::model::config::{
    ConfigError, Level, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS,
};

/// The largest side of an image in pixels, and the most patches of one. They bound the memory of activations.
const MAX_SIDE: u64 = 4096;
const MAX_PATCHES: usize = 1 << 14;

/// A tower: a transformer over the patches of an image, whose results are pooled and projected into the language model
/// (SigLIP).
#[derive(Debug, Clone, PartialEq)]
pub struct VisionSpec {
    /// Width and height of an image in pixels.
    pub image_size: usize,
    /// Width and height of a patch, a divisor of `image_size`.
    pub patch_size: usize,
    /// How the levels of a pixel become numbers.
    pub pixels: PixelScale,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    /// Dimension of a head, a multiple of 4.
    pub head_dim: usize,
    pub num_hidden_layers: usize,
    pub hidden_act: HiddenAct,
    /// The epsilon of all norms of the tower, and of the norm before the projection.
    pub norm_eps: f32,
    /// Width and height of the squares of patches that become one token.
    pub pool: usize,
    /// Elements of a token's embedding in the language model.
    pub text_hidden_size: usize,
}

/// The matrix of a product and the bias that is added, or the factors of a norm and the numbers that are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine<T> {
    pub weight: T,
    pub bias: T,
}

/// One value for each tensor of a layer of a tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionLayer<T> {
    pub layer_norm1: Affine<T>,
    pub q_proj: Affine<T>,
    pub k_proj: Affine<T>,
    pub v_proj: Affine<T>,
    pub out_proj: Affine<T>,
    pub layer_norm2: Affine<T>,
    pub fc1: Affine<T>,
    pub fc2: Affine<T>,
}

/// One value for each tensor of a tower and of its projector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionTensors<T> {
    pub patch_embedding: Affine<T>,
    pub position_embedding: T,
    pub layers: Vec<VisionLayer<T>>,
    pub post_layernorm: Affine<T>,
    /// The factors of the norm before the projection, stored as `w` and used as `1 + w`; GGUF files store what is used.
    pub soft_emb_norm: T,
    /// `[hidden_size, text_hidden_size]`: each column makes an element of a token.
    pub projection: T,
}

/// A tensor of a tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionTensor {
    /// The Hugging Face name of the first checkpoints without `vision_model.`, such as
    /// `vision_tower.encoder.layers.0.mlp.fc1.weight`.
    pub name: String,
    pub shape: Vec<usize>,
    /// The shape in the words of `config.json`.
    pub shape_in_config: &'static str,
}

impl VisionTensor {
    fn new(name: impl Into<String>, shape: &[usize], shape_in_config: &'static str) -> VisionTensor {
        VisionTensor { name: name.into(), shape: shape.to_vec(), shape_in_config }
    }
}

impl<T> Affine<T> {
    pub fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<Affine<U>, E> {
        Ok(Affine { weight: f(self.weight)?, bias: f(self.bias)? })
    }
}

impl<T> VisionLayer<T> {
    /// The values in the order of the fields.
    fn into_array(self) -> [Affine<T>; 8] {
        let VisionLayer { layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2 } = self;
        [layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2]
    }

    fn as_array(&self) -> [&Affine<T>; 8] {
        let VisionLayer { layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2 } = self;
        [layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2]
    }

    fn from_array(values: [Affine<T>; 8]) -> VisionLayer<T> {
        let [layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2] = values;
        VisionLayer { layer_norm1, q_proj, k_proj, v_proj, out_proj, layer_norm2, fc1, fc2 }
    }

    fn try_map<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<VisionLayer<U>, E> {
        let mut mapped = Vec::with_capacity(8);
        for affine in self.into_array() {
            mapped.push(affine.try_map(f)?);
        }
        let all: Result<[Affine<U>; 8], _> = mapped.try_into();
        Ok(VisionLayer::from_array(all.unwrap_or_else(|_| unreachable!("as many as before"))))
    }
}

impl<T> VisionTensors<T> {
    /// The values in the order of the fields.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        fn both<T>(affine: &Affine<T>) -> [&T; 2] {
            [&affine.weight, &affine.bias]
        }
        let of_layers = self.layers.iter().flat_map(|layer| layer.as_array().into_iter().flat_map(both));
        both(&self.patch_embedding)
            .into_iter()
            .chain([&self.position_embedding])
            .chain(of_layers)
            .chain(both(&self.post_layernorm))
            .chain([&self.soft_emb_norm, &self.projection])
    }

    /// The result of `f` for each value; ends at the first error.
    pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<VisionTensors<U>, E> {
        Ok(VisionTensors {
            patch_embedding: self.patch_embedding.try_map(&mut f)?,
            position_embedding: f(self.position_embedding)?,
            layers: self.layers.into_iter().map(|layer| layer.try_map(&mut f)).collect::<Result<_, E>>()?,
            post_layernorm: self.post_layernorm.try_map(&mut f)?,
            soft_emb_norm: f(self.soft_emb_norm)?,
            projection: f(self.projection)?,
        })
    }
}

impl VisionSpec {
    /// Reads the fields of a SigLIP tower. `tokens` is the number of tokens of an image, and `text_hidden_size` the width
    /// of the language model. The defaults are those of transformers' `SiglipVisionConfig`.
    pub(in crate::model) fn read_siglip(
        level: &Level,
        tokens: usize,
        text_hidden_size: usize,
    ) -> Result<VisionSpec, ConfigError> {
        level.check_text("hidden_act", "gelu_pytorch_tanh")?;
        let image_size = level.size("image_size", 224, 1..=MAX_SIDE)?;
        let patch_size = level.size("patch_size", 16, 1..=MAX_SIDE)?;
        let hidden_size = level.size("hidden_size", 768, 1..=MAX_HIDDEN)?;
        let num_attention_heads = level.size("num_attention_heads", 12, 1..=MAX_HEADS)?;
        let channels = level.size("num_channels", 3, 1..=4)?;
        if channels != 3 {
            return Err(level.error("num_channels", format!("is {channels}; expected 3")));
        }
        if !image_size.is_multiple_of(patch_size) {
            let problem = format!("is {image_size}; expected a multiple of patch_size ({patch_size})");
            return Err(level.error("image_size", problem));
        }
        let head_dim = hidden_size / num_attention_heads;
        if head_dim * num_attention_heads != hidden_size
            || !head_dim.is_multiple_of(4)
            || !(4..=MAX_HEAD_DIM - 15).contains(&(head_dim as u64))
        {
            let problem = format!(
                "is {hidden_size} for num_attention_heads {num_attention_heads}; expected heads of a multiple of 4, at most {}",
                MAX_HEAD_DIM - 15
            );
            return Err(level.error("hidden_size", problem));
        }
        let across = image_size / patch_size;
        let side = tokens.isqrt();
        if side * side != tokens || !across.is_multiple_of(side) || across * across > MAX_PATCHES {
            let problem = format!(
                "makes {across} * {across} patches, which mm_tokens_per_image ({tokens}) does not divide into squares, or \
                 which are more than {MAX_PATCHES}"
            );
            return Err(level.error("image_size", problem));
        }
        Ok(VisionSpec {
            image_size,
            patch_size,
            pixels: PixelScale { factors: [2.0 / 255.0; 3], shifts: [-1.0; 3] },
            hidden_size,
            intermediate_size: level.size("intermediate_size", 3072, 1..=MAX_INTERMEDIATE)?,
            num_attention_heads,
            head_dim,
            num_hidden_layers: level.size("num_hidden_layers", 12, 1..=MAX_LAYERS)?,
            hidden_act: HiddenAct::GeluTanh,
            norm_eps: level.number("layer_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
            pool: across / side,
            text_hidden_size,
        })
    }

    /// Number of patches along a side.
    pub fn patches_across(&self) -> usize {
        self.image_size / self.patch_size
    }

    pub fn patches(&self) -> usize {
        self.patches_across().pow(2)
    }

    /// Numbers of a patch.
    pub fn patch_elements(&self) -> usize {
        3 * self.patch_size.pow(2)
    }

    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        (self.patches_across() / self.pool).pow(2)
    }

    /// The tensors of the tower, which are in Hugging Face's checkpoints of all generations.
    pub fn tensors(&self) -> VisionTensors<VisionTensor> {
        let (hidden, ffn) = (self.hidden_size, self.intermediate_size);
        let affine = |name: String, weight: &[usize], of_weight, of_bias| Affine {
            weight: VisionTensor::new(format!("{name}.weight"), weight, of_weight),
            bias: VisionTensor::new(format!("{name}.bias"), &weight[..1], of_bias),
        };
        let layer = |i: usize| {
            let named = |name: &str| format!("vision_tower.encoder.layers.{i}.{name}");
            let norm = |name| affine(named(name), &[hidden], "hidden_size", "hidden_size");
            let square =
                |name| affine(named(name), &[hidden, hidden], "hidden_size, hidden_size", "hidden_size");
            VisionLayer {
                layer_norm1: norm("layer_norm1"),
                q_proj: square("self_attn.q_proj"),
                k_proj: square("self_attn.k_proj"),
                v_proj: square("self_attn.v_proj"),
                out_proj: square("self_attn.out_proj"),
                layer_norm2: norm("layer_norm2"),
                fc1: affine(
                    named("mlp.fc1"),
                    &[ffn, hidden],
                    "intermediate_size, hidden_size",
                    "intermediate_size",
                ),
                fc2: affine(
                    named("mlp.fc2"),
                    &[hidden, ffn],
                    "hidden_size, intermediate_size",
                    "hidden_size",
                ),
            }
        };
        let patch = self.patch_size;
        let one = |name: &str, shape: &[usize], in_config| VisionTensor::new(name, shape, in_config);
        VisionTensors {
            patch_embedding: affine(
                "vision_tower.embeddings.patch_embedding".into(),
                &[hidden, 3, patch, patch],
                "hidden_size, num_channels, patch_size, patch_size",
                "hidden_size",
            ),
            position_embedding: one(
                "vision_tower.embeddings.position_embedding.weight",
                &[self.patches(), hidden],
                "(image_size / patch_size)^2, hidden_size",
            ),
            layers: (0..self.num_hidden_layers).map(layer).collect(),
            post_layernorm: affine(
                "vision_tower.post_layernorm".into(),
                &[hidden],
                "hidden_size",
                "hidden_size",
            ),
            soft_emb_norm: one("multi_modal_projector.mm_soft_emb_norm.weight", &[hidden], "hidden_size"),
            projection: one(
                "multi_modal_projector.mm_input_projection_weight",
                &[hidden, self.text_hidden_size],
                "hidden_size, text_config.hidden_size",
            ),
        }
    }
}
