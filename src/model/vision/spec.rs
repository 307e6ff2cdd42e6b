//! The description of a tower as data: its sizes, and its tensors. An architecture's folder produces it from a config.

use crate::kernels::{HiddenAct, PixelScale};
use crate::model::ImageSizes;
use crate::model::config::{
    ConfigError, Level, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS,
};
use crate::model::rope::THETAS;

/// The largest side of an image in pixels, and the most patches of one. They bound the memory of activations.
pub(super) const MAX_SIDE: u64 = 4096;
const MAX_PATCHES: usize = 1 << 14;

/// A tower: it makes the embeddings of tokens from the patches of an image.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionSpec {
    pub sizes: ImageSizes,
    /// Width and height of a patch in pixels.
    pub patch_size: usize,
    /// How the levels of a pixel become numbers.
    pub pixels: PixelScale,
    /// Elements of a patch after its first product.
    pub hidden_size: usize,
    pub encoder: Encoder,
    /// The epsilon of the norms of an encoder's layers, and of the norm before the projection.
    pub norm_eps: f32,
    /// Width and height of the squares of patches that become one token.
    pub pool: usize,
    /// Elements of a token's embedding in the language model.
    pub text_hidden_size: usize,
    pub attention: ImageAttention,
}

/// In which layers of the language model the tokens of an image see each other in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAttention {
    All,
    /// Those with a window, as far as it reaches.
    WithWindow,
    /// None: the tokens of an image see those before them, as the tokens of a text do.
    None,
}

impl ImageAttention {
    /// Whether it is so in a layer with this window.
    pub fn is_in(self, window: Option<usize>) -> bool {
        match self {
            ImageAttention::All => true,
            ImageAttention::WithWindow => window.is_some(),
            ImageAttention::None => false,
        }
    }
}

/// What a tower computes between the patches and the projection into the language model.
#[derive(Debug, Clone, PartialEq)]
pub enum Encoder {
    /// A transformer with LayerNorms and biases. Each patch of its only grid has an embedding of its position (SigLIP).
    LayerNorms(Transformer),
    /// A transformer with RMSNorms before and after each sublayer, norms of queries, keys and values, and gated networks.
    /// The column and the row of a patch have an embedding each. RoPE turns one half of a head by the column, and the other
    /// by the row (axial).
    RmsNorms {
        layers: Transformer,
        /// The columns and rows that have an embedding.
        positions: usize,
        /// The base of the frequencies of RoPE.
        theta: f64,
        /// Whether the checkpoint has a bias and a scale for the means of patches.
        standardizes: bool,
    },
    /// No transformer: LayerNorms, and embeddings of the column and the row of a patch, of so many columns and rows.
    Linear { positions: usize },
}

/// The sizes of a transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Transformer {
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    /// Dimension of a head, a multiple of 4.
    pub head_dim: usize,
    pub num_hidden_layers: usize,
    pub hidden_act: HiddenAct,
}

/// What the device keeps of a tensor. A matrix is `[rows, columns]` and multiplies from the left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Vector,
    /// The factors of a norm, stored as `w` and used as `1 + w`. GGUF files have what is used.
    OnePlus,
    Matrix,
    /// A matrix that the checkpoint has by columns.
    Transposed,
    /// The rows of a matrix or the elements of a vector are those of heads, one head after the other.
    Heads,
    /// The same, and RoPE is axial.
    AxialHeads,
    /// The columns of a matrix are those of heads.
    OfHeads,
    /// The columns of a matrix or the elements of a vector are those of patches, pixel by pixel. The kernel that makes
    /// patches writes them channel by channel, and so do GGUF files.
    OfPixels,
    /// `[patches, width]`
    Rows,
    /// `[2, positions, width]`: the vectors of columns, and those of rows.
    Axes,
    /// `[positions, 2, width]`. GGUF files have [`Form::Axes`].
    InterleavedAxes,
}

/// A tensor of a tower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionTensor {
    /// The Hugging Face name of the published checkpoints without `model.` and `vision_model.`, such as
    /// `vision_tower.encoder.layers.0.mlp.fc1.weight`.
    pub name: String,
    pub shape: Vec<usize>,
    /// The shape in the words of `config.json`.
    pub shape_in_config: &'static str,
    /// Both in GGUF files, if they have another one.
    in_gguf: Option<(Vec<usize>, &'static str)>,
    pub(super) form: Form,
}

impl VisionTensor {
    /// Whether vectors are multiplied by it.
    pub(in crate::model) fn is_matrix(&self) -> bool {
        let is_added = matches!(self.form, Form::Rows | Form::Axes | Form::InterleavedAxes);
        self.shape.len() > 1 && !is_added
    }

    /// The shape of the stored tensor, and its words, in a checkpoint with GGUF's layout or without it.
    pub(in crate::model) fn stored_shape(&self, has_gguf_layout: bool) -> (&[usize], &'static str) {
        match &self.in_gguf {
            Some((shape, words)) if has_gguf_layout => (shape, words),
            _ => (&self.shape, self.shape_in_config),
        }
    }
}

impl VisionSpec {
    /// Reads the fields of a SigLIP tower. `tokens` is the number of tokens of an image, and `text_hidden_size` the width
    /// of the language model. The defaults are those of transformers' class.
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
        if head_dim * num_attention_heads != hidden_size || !is_head_dim(head_dim) {
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
            sizes: ImageSizes::Fixed { side: image_size },
            patch_size,
            pixels: PixelScale { factors: [2.0 / 255.0; 3], shifts: [-1.0; 3] },
            hidden_size,
            encoder: Encoder::LayerNorms(Transformer {
                intermediate_size: level.size("intermediate_size", 3072, 1..=MAX_INTERMEDIATE)?,
                num_attention_heads,
                head_dim,
                num_hidden_layers: level.size("num_hidden_layers", 12, 1..=MAX_LAYERS)?,
                hidden_act: HiddenAct::GeluTanh,
            }),
            norm_eps: level.number("layer_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
            pool: across / side,
            text_hidden_size,
            attention: ImageAttention::All,
        })
    }

    /// Reads the fields of a tower with an axial RoPE. The defaults are those of transformers' class.
    pub(in crate::model) fn read_axial(
        level: &Level,
        text_hidden_size: usize,
        attention: ImageAttention,
    ) -> Result<VisionSpec, ConfigError> {
        level.check_text("hidden_activation", "gelu_pytorch_tanh")?;
        level.check_flag("use_clipped_linears", false)?;
        level.check_flag("attention_bias", false)?;
        let num_attention_heads = level.size("num_attention_heads", 12, 1..=MAX_HEADS)?;
        let kv_heads = level.size("num_key_value_heads", num_attention_heads, 1..=MAX_HEADS)?;
        if kv_heads != num_attention_heads {
            let problem = format!("is {kv_heads}; expected num_attention_heads ({num_attention_heads})");
            return Err(level.error("num_key_value_heads", problem));
        }
        let head_dim = level.size("head_dim", 64, 1..=MAX_HEAD_DIM)?;
        if !is_head_dim(head_dim) {
            let problem = format!("is {head_dim}; expected a multiple of 4, at most {}", MAX_HEAD_DIM - 15);
            return Err(level.error("head_dim", problem));
        }
        let theta = match level.object("rope_parameters")? {
            None => 100.0,
            Some(rope) => {
                // Older versions of transformers call it "default".
                if rope.text("rope_type")? != Some("default") {
                    rope.check_text("rope_type", "axial")?;
                }
                rope.number("rope_theta", 100.0, THETAS)?
            }
        };
        let (patch_size, pool) = patches_and_pool(level)?;
        let positions = level.size("position_embedding_size", 10 * 1024, pool as u64..=MAX_POSITIONS)?;
        Ok(VisionSpec {
            sizes: ImageSizes::ByTokens { unit: patch_size * pool, longest: positions / pool },
            patch_size,
            pixels: PixelScale { factors: [2.0 / 255.0; 3], shifts: [-1.0; 3] },
            hidden_size: level.size("hidden_size", 768, 1..=MAX_HIDDEN)?,
            encoder: Encoder::RmsNorms {
                layers: Transformer {
                    intermediate_size: level.size("intermediate_size", 3072, 1..=MAX_INTERMEDIATE)?,
                    num_attention_heads,
                    head_dim,
                    num_hidden_layers: level.size("num_hidden_layers", 16, 1..=MAX_LAYERS)?,
                    hidden_act: HiddenAct::GeluTanh,
                },
                positions,
                theta,
                standardizes: level.flag("standardize")?.unwrap_or(false),
            },
            norm_eps: level.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
            pool,
            text_hidden_size,
            attention,
        })
    }

    /// Reads the fields of a tower without a transformer. The defaults are those of transformers' class.
    pub(in crate::model) fn read_linear(
        level: &Level,
        text_hidden_size: usize,
        attention: ImageAttention,
    ) -> Result<VisionSpec, ConfigError> {
        let (patch_size, pool) = patches_and_pool(level)?;
        let hidden_size = level.size("mm_embed_dim", 3840, 1..=MAX_HIDDEN)?;
        let projected = level.size("output_proj_dims", hidden_size, 1..=MAX_HIDDEN)?;
        if projected != hidden_size {
            let problem = format!("is {projected}; expected mm_embed_dim ({hidden_size})");
            return Err(level.error("output_proj_dims", problem));
        }
        let side = patch_size * pool;
        let positions = level.size("mm_posemb_size", 1120, 1..=MAX_POSITIONS)?;
        Ok(VisionSpec {
            sizes: ImageSizes::ByTokens { unit: side, longest: positions },
            patch_size: side,
            pixels: PixelScale { factors: [1.0 / 255.0; 3], shifts: [0.0; 3] },
            hidden_size,
            encoder: Encoder::Linear { positions },
            norm_eps: level.number("rms_norm_eps", 1e-6, 1e-30..=1.0)? as f32,
            pool: 1,
            text_hidden_size,
            attention,
        })
    }

    /// The columns and rows of patches of an image of that width and height.
    pub fn grid(&self, size: [usize; 2]) -> [usize; 2] {
        size.map(|side| side / self.patch_size)
    }

    /// Numbers of a patch.
    pub fn patch_elements(&self) -> usize {
        3 * self.patch_size.pow(2)
    }

    /// Patches of a token.
    pub fn patches_per_token(&self) -> usize {
        self.pool.pow(2)
    }

    /// Tokens of each image, if all have the same number.
    pub fn fixed_tokens(&self) -> Option<usize> {
        match self.sizes {
            ImageSizes::Fixed { side } => Some((side / self.patch_size / self.pool).pow(2)),
            ImageSizes::ByTokens { .. } => None,
        }
    }

    /// The transformer, if there is one.
    pub fn transformer(&self) -> Option<&Transformer> {
        match &self.encoder {
            Encoder::LayerNorms(layers) | Encoder::RmsNorms { layers, .. } => Some(layers),
            Encoder::Linear { .. } => None,
        }
    }

    /// The columns, or rows, of patches of an image with at most so many tokens.
    pub(super) fn most_positions(&self, tokens: usize) -> usize {
        let positions = match self.encoder {
            Encoder::LayerNorms(_) => usize::MAX,
            Encoder::RmsNorms { positions, .. } | Encoder::Linear { positions } => positions,
        };
        positions.min(tokens * self.pool)
    }

    /// The tensors of the tower and of its projector, in the order in which a load takes them.
    pub fn tensors(&self) -> Vec<VisionTensor> {
        let mut list = List(Vec::new());
        match &self.encoder {
            Encoder::LayerNorms(layers) => self.list_layer_norms(&mut list, layers),
            Encoder::RmsNorms { layers, positions, standardizes, .. } => {
                self.list_rms_norms(&mut list, layers, *positions, *standardizes);
            }
            Encoder::Linear { positions } => self.list_linear(&mut list, *positions),
        }
        list.0
    }

    fn list_layer_norms(&self, list: &mut List, layers: &Transformer) {
        let (hidden, ffn, patch) = (self.hidden_size, layers.intermediate_size, self.patch_size);
        let name = "vision_tower.embeddings.patch_embedding";
        let meaning = "hidden_size, num_channels, patch_size, patch_size";
        list.add(format!("{name}.weight"), &[hidden, 3, patch, patch], meaning, Form::Matrix);
        list.add(format!("{name}.bias"), &[hidden], "hidden_size", Form::Vector);
        let [across, down] = match self.sizes {
            ImageSizes::Fixed { side } => self.grid([side; 2]),
            ImageSizes::ByTokens { .. } => unreachable!("each patch has a position of its own"),
        };
        let name = "vision_tower.embeddings.position_embedding.weight";
        list.add(name, &[across * down, hidden], "(image_size / patch_size)^2, hidden_size", Form::Rows);
        for i in 0..layers.num_hidden_layers {
            let named = |name: &str| format!("vision_tower.encoder.layers.{i}.{name}");
            let mut affine = |name: &str, weight: &[usize], meaning: [&'static str; 2], forms: [Form; 2]| {
                list.add(format!("{}.weight", named(name)), weight, meaning[0], forms[0]);
                list.add(format!("{}.bias", named(name)), &weight[..1], meaning[1], forms[1]);
            };
            let (square, width) = ("hidden_size, hidden_size", "hidden_size");
            let norm = ([width; 2], [Form::Vector; 2]);
            affine("layer_norm1", &[hidden], norm.0, norm.1);
            for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] {
                affine(name, &[hidden, hidden], [square, width], [Form::Heads; 2]);
            }
            affine("self_attn.out_proj", &[hidden, hidden], [square, width], [Form::OfHeads, Form::Vector]);
            affine("layer_norm2", &[hidden], norm.0, norm.1);
            let meaning = ["intermediate_size, hidden_size", "intermediate_size"];
            affine("mlp.fc1", &[ffn, hidden], meaning, [Form::Matrix, Form::Vector]);
            let meaning = ["hidden_size, intermediate_size", width];
            affine("mlp.fc2", &[hidden, ffn], meaning, [Form::Matrix, Form::Vector]);
        }
        for name in ["vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.bias"] {
            list.add(name, &[hidden], "hidden_size", Form::Vector);
        }
        let name = "multi_modal_projector.mm_soft_emb_norm.weight";
        list.add(name, &[hidden], "hidden_size", Form::OnePlus);
        let name = "multi_modal_projector.mm_input_projection_weight";
        let meaning = "hidden_size, text_config.hidden_size";
        list.add(name, &[hidden, self.text_hidden_size], meaning, Form::Transposed);
    }

    fn list_rms_norms(&self, list: &mut List, layers: &Transformer, positions: usize, standardizes: bool) {
        let (hidden, ffn) = (self.hidden_size, layers.intermediate_size);
        let heads = layers.num_attention_heads * layers.head_dim;
        let name = "vision_tower.patch_embedder.input_proj.weight";
        list.add(name, &[hidden, self.patch_elements()], "hidden_size, 3 * patch_size^2", Form::OfPixels);
        let shape = [hidden, 3, self.patch_size, self.patch_size];
        list.in_gguf(&shape, "hidden_size, 3, patch_size, patch_size");
        let name = "vision_tower.patch_embedder.position_embedding_table";
        list.add(name, &[2, positions, hidden], "2, position_embedding_size, hidden_size", Form::Axes);
        for i in 0..layers.num_hidden_layers {
            let mut one = |name: &str, shape: &[usize], meaning, form| {
                list.add(format!("vision_tower.encoder.layers.{i}.{name}.weight"), shape, meaning, form);
            };
            let (projected, width) = ("num_attention_heads * head_dim, hidden_size", "hidden_size");
            one("input_layernorm", &[hidden], width, Form::Vector);
            one("self_attn.q_proj.linear", &[heads, hidden], projected, Form::AxialHeads);
            one("self_attn.k_proj.linear", &[heads, hidden], projected, Form::AxialHeads);
            one("self_attn.v_proj.linear", &[heads, hidden], projected, Form::Heads);
            one("self_attn.q_norm", &[layers.head_dim], "head_dim", Form::AxialHeads);
            one("self_attn.k_norm", &[layers.head_dim], "head_dim", Form::AxialHeads);
            let meaning = "hidden_size, num_attention_heads * head_dim";
            one("self_attn.o_proj.linear", &[hidden, heads], meaning, Form::OfHeads);
            one("post_attention_layernorm", &[hidden], width, Form::Vector);
            one("pre_feedforward_layernorm", &[hidden], width, Form::Vector);
            for name in ["mlp.gate_proj.linear", "mlp.up_proj.linear"] {
                one(name, &[ffn, hidden], "intermediate_size, hidden_size", Form::Matrix);
            }
            one("mlp.down_proj.linear", &[hidden, ffn], "hidden_size, intermediate_size", Form::Matrix);
            one("post_feedforward_layernorm", &[hidden], width, Form::Vector);
        }
        if standardizes {
            list.add("vision_tower.std_bias", &[hidden], "hidden_size", Form::Vector);
            list.add("vision_tower.std_scale", &[hidden], "hidden_size", Form::Vector);
        }
        self.list_projection(list, "text_config.hidden_size, hidden_size");
    }

    fn list_linear(&self, list: &mut List, positions: usize) {
        let (hidden, patch) = (self.hidden_size, self.patch_elements());
        let named = |name: &str| format!("vision_embedder.{name}");
        let (of_patch, width) = ("3 * (patch_size * pooling_kernel_size)^2", "mm_embed_dim");
        let of_matrix = "mm_embed_dim, 3 * (patch_size * pooling_kernel_size)^2";
        list.add(named("patch_ln1.weight"), &[patch], of_patch, Form::OfPixels);
        list.add(named("patch_ln1.bias"), &[patch], of_patch, Form::OfPixels);
        list.add(named("patch_dense.weight"), &[hidden, patch], of_matrix, Form::OfPixels);
        list.add(named("patch_dense.bias"), &[hidden], width, Form::Vector);
        list.add(named("patch_ln2.weight"), &[hidden], width, Form::Vector);
        list.add(named("patch_ln2.bias"), &[hidden], width, Form::Vector);
        let meaning = "mm_posemb_size, 2, mm_embed_dim";
        list.add(named("pos_embedding"), &[positions, 2, hidden], meaning, Form::InterleavedAxes);
        list.in_gguf(&[2, positions, hidden], "2, mm_posemb_size, mm_embed_dim");
        list.add(named("pos_norm.weight"), &[hidden], width, Form::Vector);
        list.add(named("pos_norm.bias"), &[hidden], width, Form::Vector);
        self.list_projection(list, "text_config.hidden_size, mm_embed_dim");
    }

    fn list_projection(&self, list: &mut List, meaning: &'static str) {
        let name = "embed_vision.embedding_projection.weight";
        list.add(name, &[self.text_hidden_size, self.hidden_size], meaning, Form::Matrix);
    }
}

/// Zeros are appended to heads up to the next multiple of 16.
fn is_head_dim(head_dim: usize) -> bool {
    head_dim.is_multiple_of(4) && (4..=MAX_HEAD_DIM as usize - 15).contains(&head_dim)
}

/// The sides of a patch and of the square of patches that is a token.
fn patches_and_pool(level: &Level) -> Result<(usize, usize), ConfigError> {
    let patch_size = level.size("patch_size", 16, 1..=MAX_SIDE)?;
    let pool = level.size("pooling_kernel_size", 3, 1..=64)?;
    if patch_size * pool > MAX_SIDE as usize {
        let problem = format!(
            "is {patch_size}, and {pool} patches are a token's side; expected at most {MAX_SIDE} pixels"
        );
        return Err(level.error("patch_size", problem));
    }
    Ok((patch_size, pool))
}

/// A list of tensors.
struct List(Vec<VisionTensor>);

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], shape_in_config: &'static str, form: Form) {
        let (name, shape) = (name.into(), shape.to_vec());
        self.0.push(VisionTensor { name, shape, shape_in_config, in_gguf: None, form });
    }

    /// Says which shape the last tensor has in GGUF files.
    fn in_gguf(&mut self, shape: &[usize], words: &'static str) {
        self.0.last_mut().expect("a tensor").in_gguf = Some((shape.to_vec(), words));
    }
}
