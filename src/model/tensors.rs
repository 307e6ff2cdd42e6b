//! The table of a model's tensors: name, shape, role and place of each.
//!
//! Everything that lists a model's weights reads this table: the check of a checkpoint, the memory plan, the load, the
//! writer of native checkpoints, and the reports. [`Layer`] holds one value per tensor of a layer, by name.

use std::ops::Index;

use crate::gpu::placement::Class;
use crate::kernels::STREAMS;

/// A tensor that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name without the prefix of the language model and without `.weight` or `.bias`, such as
    /// `layers.3.self_attn.q_proj`. The name of [`Role::Factors`] has no such ending.
    pub name: String,
    /// `[out, in]` of a matrix, `[experts, out, in]` of the matrices of all experts, `[n]` of another tensor.
    pub shape: Vec<usize>,
    /// The shape in the words of `config.json`.
    pub shape_in_config: &'static str,
    pub role: Role,
    /// The class of its device memory.
    pub class: Class,
    /// `None` for the tensors outside of the layers.
    pub layer: Option<usize>,
}

/// The use of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A matrix whose rows are embeddings. It also computes the logits if the model has no [`Role::Head`].
    Embedding,
    /// The matrix that computes the logits. Its name has no prefix.
    Head,
    /// A matrix that multiplies the activations of a group.
    Projection(InputGroup),
    Norm,
    /// The bias of a projection.
    Bias,
    /// The matrix of a router.
    Router,
    /// The coefficients by which a layer updates residual streams.
    Coefficients,
    /// A matrix whose rows have an embedding for each layer.
    PerLayerEmbedding,
    /// A matrix that no mode of quantization changes: between these embeddings and the residual stream, between residual
    /// streams, or of a learned residual.
    KeptMatrix,
    /// Factors whose name has no ending: of the result of a layer, of a router's input, of the results of experts, of the
    /// first of several residual streams.
    Factors,
}

/// The matrices of a layer that multiply the same activations. Those of an expert multiply the activations of the tokens
/// that chose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputGroup {
    Qkv,
    Output,
    GateUp,
    Down,
    ExpertGateUp,
    ExpertDown,
}

impl TensorSpec {
    /// The name without the prefix of the language model, such as `layers.3.self_attn.q_proj.weight`.
    pub fn stored_name(&self) -> String {
        match self.role {
            Role::Factors => self.name.clone(),
            Role::Bias => format!("{}.bias", self.name),
            _ => format!("{}.weight", self.name),
        }
    }

    /// The name in checkpoints of the text model alone, such as `model.layers.3.self_attn.q_proj.weight`.
    pub fn full_name(&self) -> String {
        let prefix = if self.role == Role::Head { "" } else { "model." };
        format!("{prefix}{}", self.stored_name())
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    /// The number of matrices: 1, or one for each expert.
    pub fn matrices(&self) -> usize {
        if self.is_of_experts() { self.shape[0] } else { 1 }
    }

    /// Rows of a matrix, or of the matrices of all experts.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Whether the tensor holds the matrices of all experts of a layer.
    pub fn is_of_experts(&self) -> bool {
        matches!(self.role, Role::Projection(InputGroup::ExpertGateUp | InputGroup::ExpertDown))
    }

    /// Columns of a matrix. Panics for other tensors.
    pub fn cols(&self) -> usize {
        assert!(self.shape.len() > 1, "{} has no columns", self.name);
        self.shape[self.shape.len() - 1]
    }
}

/// A value that every layer has, a value that some models lack, and a value for each residual stream besides the first one.
type Always<T> = T;
type Optional<T> = Option<T>;
type PerStream<T> = [T; STREAMS - 1];

/// The same operation on a value of either kind.
macro_rules! on_each {
    (map Always $value:expr, $f:expr) => {
        $f($value)
    };
    (map Optional $value:expr, $f:expr) => {
        $value.map(&mut $f)
    };
    (map PerStream $value:expr, $f:expr) => {
        $value.map(&mut $f)
    };
    (try_map Always $value:expr, $f:expr) => {
        $f($value)?
    };
    (try_map Optional $value:expr, $f:expr) => {
        $value.map(&mut $f).transpose()?
    };
    (try_map PerStream $value:expr, $f:expr) => {{
        let [a, b, c] = $value;
        [$f(a)?, $f(b)?, $f(c)?]
    }};
    (zip Always $a:expr, $b:expr) => {
        ($a, $b)
    };
    (zip Optional $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        assert_eq!(a.is_some(), b.is_some(), "tensors of different models");
        a.zip(b)
    }};
    (zip PerStream $a:expr, $b:expr) => {{
        let ([a, b, c], [d, e, f]) = ($a, $b);
        [(a, d), (b, e), (c, f)]
    }};
    (as_ref Always $value:expr) => {
        &$value
    };
    (as_ref Optional $value:expr) => {
        $value.as_ref()
    };
    (as_ref PerStream $value:expr) => {
        $value.each_ref()
    };
    (slice Always $value:expr) => {
        std::slice::from_ref(&$value)
    };
    (slice Optional $value:expr) => {
        $value.as_slice()
    };
    (slice PerStream $value:expr) => {
        $value.as_slice()
    };
}

macro_rules! one_value_each {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name<T> {
            $(pub $field: $kind<T>,)+
        }

        impl<T> $name<T> {
            /// The result of `f` for each value, in the order of the fields.
            pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> $name<U> {
                $name { $($field: on_each!(map $kind self.$field, f),)+ }
            }

            /// As `map`; ends at the first error.
            pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<$name<U>, E> {
                Ok($name { $($field: on_each!(try_map $kind self.$field, f),)+ })
            }

            /// The values of both, in pairs. Panics if only one of them has an optional value.
            pub fn zip<U>(self, other: $name<U>) -> $name<(T, U)> {
                $name { $($field: on_each!(zip $kind self.$field, other.$field),)+ }
            }

            pub fn as_ref(&self) -> $name<&T> {
                $name { $($field: on_each!(as_ref $kind self.$field),)+ }
            }

            /// The values in the order of the fields.
            pub fn iter(&self) -> impl Iterator<Item = &T> {
                [$(on_each!(slice $kind self.$field),)+].into_iter().flatten()
            }
        }
    };
}

one_value_each! {
    /// One value for each matrix of a layer, and for the matrices of all its experts. Without `v_proj`, the values are
    /// what `k_proj` computes. Without both, the layer uses the keys and values of another one. A layer has a dense
    /// feed-forward network, experts, or both.
    Projections {
        q_proj: Always,
        k_proj: Optional,
        v_proj: Optional,
        o_proj: Always,
        gate_proj: Optional,
        up_proj: Optional,
        down_proj: Optional,
        expert_gate_proj: Optional,
        expert_up_proj: Optional,
        expert_down_proj: Optional,
    }
}

one_value_each! {
    /// One value for each norm of a layer. [`Norms::pre_feedforward_layernorm`] is the norm before the feed-forward
    /// network, which architectures without the optional norms store as `post_attention_layernorm`. Layers with experts
    /// and a dense network may have norms of their own for both results, and one before the experts.
    Norms {
        input_layernorm: Always,
        post_attention_layernorm: Optional,
        pre_feedforward_layernorm: Always,
        post_feedforward_layernorm: Optional,
        q_norm: Optional,
        k_norm: Optional,
        post_feedforward_layernorm_1: Optional,
        pre_feedforward_layernorm_2: Optional,
        post_feedforward_layernorm_2: Optional,
        post_per_layer_input_norm: Optional,
        post_laurel_norm: Optional,
        router_norm: Optional,
    }
}

one_value_each! {
    /// One value for each matrix of a layer that no mode of quantization changes: those between the layer's part of the
    /// per-layer embeddings and the residual stream, and the two factors of a learned residual (Laurel).
    KeptMatrices {
        per_layer_input_gate: Optional,
        per_layer_projection: Optional,
        linear_left: Optional,
        linear_right: Optional,
    }
}

one_value_each! {
    /// One value for each matrix that makes the other residual streams from the first one before the layers, and for each
    /// that brings them together after the layers.
    StreamProjections { altup_projections: PerStream, altup_unembed_projections: PerStream }
}

one_value_each! {
    /// One value for each tensor by which a layer updates the residual streams.
    AltUpTensors {
        modality_router: Optional,
        prediction_coefs: Optional,
        correction_coefs: Optional,
        correct_output_scale: Optional,
    }
}

one_value_each! {
    /// One value for each tensor that computes the per-layer embeddings of a token: a row for each token, a matrix that
    /// multiplies the token's embedding, and the norm of that product in each layer.
    PerLayerEmbeddings {
        embed_tokens_per_layer: Always,
        per_layer_model_projection: Always,
        per_layer_projection_norm: Always,
    }
}

one_value_each! {
    /// One value for each tensor of a layer's router: its matrix, the factors of its input, and those of the results of
    /// experts.
    RouterTensors { proj: Optional, scale: Optional, per_expert_scale: Optional }
}

one_value_each! {
    /// One value for each bias of a layer, by the matrix whose product it is added to.
    Biases { q_proj: Optional, k_proj: Optional, v_proj: Optional }
}

one_value_each! {
    /// One value for each number of a layer.
    Scalars { layer_scalar: Optional }
}

one_value_each! {
    /// One value for each group of matrices that have the same input.
    Inputs {
        qkv: Always,
        output: Always,
        gate_up: Optional,
        down: Optional,
        expert_gate_up: Optional,
        expert_down: Optional,
    }
}

impl<T> Index<InputGroup> for Inputs<T> {
    type Output = T;

    fn index(&self, group: InputGroup) -> &T {
        match group {
            InputGroup::Qkv => &self.qkv,
            InputGroup::Output => &self.output,
            InputGroup::GateUp => self.gate_up.as_ref().expect("a dense feed-forward network"),
            InputGroup::Down => self.down.as_ref().expect("a dense feed-forward network"),
            InputGroup::ExpertGateUp => self.expert_gate_up.as_ref().expect("experts"),
            InputGroup::ExpertDown => self.expert_down.as_ref().expect("experts"),
        }
    }
}

/// One value for each tensor of a layer. Norms, biases, numbers and routers may have other types than matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Layer<M, N = M, B = N, S = N, R = B> {
    pub projections: Projections<M>,
    pub norms: Norms<N>,
    pub biases: Biases<B>,
    pub scalars: Scalars<S>,
    pub router: RouterTensors<R>,
    pub kept: KeptMatrices<M>,
    pub altup: AltUpTensors<R>,
}

impl<T> Layer<T> {
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Layer<U> {
        Layer {
            projections: self.projections.map(&mut f),
            norms: self.norms.map(&mut f),
            biases: self.biases.map(&mut f),
            scalars: self.scalars.map(&mut f),
            router: self.router.map(&mut f),
            kept: self.kept.map(&mut f),
            altup: self.altup.map(f),
        }
    }

    pub fn zip<U>(self, other: Layer<U>) -> Layer<(T, U)> {
        Layer {
            projections: self.projections.zip(other.projections),
            norms: self.norms.zip(other.norms),
            biases: self.biases.zip(other.biases),
            scalars: self.scalars.zip(other.scalars),
            router: self.router.zip(other.router),
            kept: self.kept.zip(other.kept),
            altup: self.altup.zip(other.altup),
        }
    }

    pub fn as_ref(&self) -> Layer<&T> {
        Layer {
            projections: self.projections.as_ref(),
            norms: self.norms.as_ref(),
            biases: self.biases.as_ref(),
            scalars: self.scalars.as_ref(),
            router: self.router.as_ref(),
            kept: self.kept.as_ref(),
            altup: self.altup.as_ref(),
        }
    }

    /// The values of the matrices, then those of the norms, of the biases, of the numbers, of the router, of the matrices
    /// that stay as they are, and of the updates of residual streams.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let vectors = self.norms.iter().chain(self.biases.iter());
        let others = self.scalars.iter().chain(self.router.iter()).chain(self.kept.iter());
        let others = others.chain(self.altup.iter());
        self.projections.iter().chain(vectors).chain(others)
    }
}

impl Projections<TensorSpec> {
    /// The number of columns of one matrix of each group: of experts, those of all experts' matrices.
    pub fn input_columns(&self) -> Inputs<usize> {
        let columns = |spec: &TensorSpec| spec.matrices() * spec.cols();
        Inputs {
            qkv: columns(&self.q_proj),
            output: columns(&self.o_proj),
            gate_up: self.gate_proj.as_ref().map(columns),
            down: self.down_proj.as_ref().map(columns),
            expert_gate_up: self.expert_gate_proj.as_ref().map(columns),
            expert_down: self.expert_down_proj.as_ref().map(columns),
        }
    }
}

/// The names of a tensor of a layer in both kinds of checkpoints, without `.weight` or `.bias`. Factors have the whole
/// name.
pub(super) struct Names {
    pub hugging_face: &'static str,
    pub gguf: &'static str,
}

impl Names {
    pub const fn of(hugging_face: &'static str, gguf: &'static str) -> Names {
        Names { hugging_face, gguf }
    }
}

impl Layer<Names> {
    /// The Hugging Face name of a tensor of a GGUF file, whose name there ends with `what`.
    pub fn of_gguf(&self, name: &str, what: &str) -> Option<String> {
        let Layer { projections, norms, biases, scalars, router, kept, altup } = self;
        let of_experts = router.scale.iter().chain(&router.per_expert_scale);
        let factors = scalars.iter().chain(of_experts).chain(&altup.correct_output_scale);
        let whole = format!("{name}.{what}");
        let mut factors = factors.into_iter();
        if let Some(names) = factors.find(|names| names.gguf == whole) {
            return Some(names.hugging_face.to_owned());
        }
        let vectors = norms.iter().chain(biases.iter());
        let coefficients = altup.modality_router.iter().chain(&altup.prediction_coefs);
        let coefficients = coefficients.chain(&altup.correction_coefs);
        let matrices = projections.iter().chain(&router.proj).chain(kept.iter()).chain(coefficients);
        let names = matrices.chain(vectors).find(|names| names.gguf == name)?;
        Some(format!("{}.{what}", names.hugging_face))
    }
}

/// The sizes of one layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerSizes {
    /// Elements of a token's queries and of its keys, and of one head.
    pub q_width: usize,
    pub kv_width: usize,
    pub head_dim: usize,
    /// Whether the layer has a matrix for keys, and one for values.
    pub has_k_proj: bool,
    pub has_v_proj: bool,
    pub intermediate_size: usize,
    /// Whether the layer has a dense feed-forward network, and whether it has experts.
    pub has_mlp: bool,
    pub has_experts: bool,
}

/// The sizes of a model, apart from the attention of its layers.
pub(super) struct Sizes {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub tie_word_embeddings: bool,
    /// The number of experts of a layer, and the width of each; (0, 0) without experts.
    pub experts: (usize, usize),
    /// The width of per-layer embeddings in one layer, and the number of ids that have some.
    pub per_layer: Option<(usize, usize)>,
    /// The rank of the learned residual in models with several residual streams.
    pub laurel_rank: Option<usize>,
}

impl ModelTensors<TensorSpec> {
    /// The tensors of a model with these layers, whose tensors have these names.
    pub(super) fn of(
        names: &Layer<Names>,
        sizes: &Sizes,
        layers: impl Iterator<Item = LayerSizes>,
    ) -> ModelTensors<TensorSpec> {
        let of = |name: &str, shape, shape_in_config, role, class| TensorSpec {
            name: name.to_owned(),
            shape,
            shape_in_config,
            role,
            class,
            layer: None,
        };
        let vocabulary = |name, role| {
            let shape = vec![sizes.vocab_size, sizes.hidden_size];
            of(name, shape, "vocab_size, hidden_size", role, Class::Embedding)
        };
        let layers: Vec<_> = layers.enumerate().collect();
        let per_layer = sizes.per_layer.map(|(width, vocab_size)| {
            let all = layers.len() * width;
            let matrix = |name: &str, shape: [usize; 2], words, role, class| {
                of(name, shape.to_vec(), words, role, class)
            };
            PerLayerEmbeddings {
                embed_tokens_per_layer: matrix(
                    "embed_tokens_per_layer",
                    [vocab_size, all],
                    "vocab_size_per_layer_input, num_hidden_layers * hidden_size_per_layer_input",
                    Role::PerLayerEmbedding,
                    Class::PerLayerEmbedding,
                ),
                per_layer_model_projection: matrix(
                    "per_layer_model_projection",
                    [all, sizes.hidden_size],
                    "num_hidden_layers * hidden_size_per_layer_input, hidden_size",
                    Role::KeptMatrix,
                    Class::Ffn,
                ),
                per_layer_projection_norm: of(
                    "per_layer_projection_norm",
                    vec![width],
                    "hidden_size_per_layer_input",
                    Role::Norm,
                    Class::Norms,
                ),
            }
        });
        let streams = sizes.laurel_rank.map(|_| {
            let matrix = |name: &str, i: usize| {
                let (name, shape) = (format!("{name}.{i}"), vec![sizes.hidden_size; 2]);
                of(&name, shape, "hidden_size, hidden_size", Role::KeptMatrix, Class::Ffn)
            };
            let each = |name: &str| std::array::from_fn(|i| matrix(name, i));
            StreamProjections {
                altup_projections: each("altup_projections"),
                altup_unembed_projections: each("altup_unembed_projections"),
            }
        });
        ModelTensors {
            embed_tokens: vocabulary("embed_tokens", Role::Embedding),
            norm: of("norm", vec![sizes.hidden_size], "hidden_size", Role::Norm, Class::Norms),
            lm_head: (!sizes.tie_word_embeddings).then(|| vocabulary("lm_head", Role::Head)),
            per_layer,
            streams,
            layers: layers.into_iter().map(|(layer, own)| Layer::of(names, sizes, layer, own)).collect(),
        }
    }
}

/// The names of tensors of keys and values in layers that use those of other layers: some checkpoints have them, and no
/// model uses them.
pub(super) fn unused_tensors(names: &Layer<Names>, layers: impl Iterator<Item = LayerSizes>) -> Vec<String> {
    let unused = [&names.projections.k_proj, &names.projections.v_proj, &names.norms.k_norm];
    let of_layer = |(layer, own): (usize, LayerSizes)| {
        let names = unused.into_iter().flatten().filter(move |_| !own.has_k_proj);
        names.map(move |names| format!("layers.{layer}.{}.weight", names.hugging_face))
    };
    layers.enumerate().flat_map(of_layer).collect()
}

impl Layer<TensorSpec> {
    fn of(names: &Layer<Names>, sizes: &Sizes, layer: usize, own: LayerSizes) -> Layer<TensorSpec> {
        use InputGroup::{Down, ExpertDown, ExpertGateUp, GateUp, Output, Qkv};
        const Q_ROWS: &str = "num_attention_heads * head_dim, hidden_size";
        const KV_ROWS: &str = "num_key_value_heads * head_dim, hidden_size";
        const FFN_ROWS: &str = "intermediate_size, hidden_size";
        let &Sizes { hidden_size: hidden, experts: (experts, expert_ffn), .. } = sizes;
        let LayerSizes { q_width: q, kv_width: kv, head_dim, intermediate_size: ffn, .. } = own;
        let LayerSizes { has_k_proj, has_v_proj, has_mlp, has_experts, .. } = own;
        let matrix = |rows, cols, shape_in_config, input, class| {
            (vec![rows, cols], shape_in_config, Role::Projection(input), class)
        };
        let vector = |n, shape_in_config, role| (vec![n], shape_in_config, role, Class::Norms);
        let norm = |n, shape_in_config| vector(n, shape_in_config, Role::Norm);
        let bias = |n, shape_in_config| vector(n, shape_in_config, Role::Bias);
        let of_experts = |rows, cols, shape_in_config, input| {
            (vec![experts, rows, cols], shape_in_config, Role::Projection(input), Class::Experts)
        };
        let factors = |n, shape_in_config| vector(n, shape_in_config, Role::Factors);
        let mut names = names.as_ref();
        if !has_v_proj {
            names.projections.v_proj = None;
        }
        if !has_k_proj {
            names.projections.k_proj = None;
            names.norms.k_norm = None;
        }
        if !has_mlp {
            let Projections { gate_proj, up_proj, down_proj, .. } = &mut names.projections;
            [gate_proj, up_proj, down_proj].into_iter().for_each(|name| *name = None);
        }
        if !has_experts {
            let Projections { expert_gate_proj, expert_up_proj, expert_down_proj, .. } =
                &mut names.projections;
            let of_experts = [expert_gate_proj, expert_up_proj, expert_down_proj];
            of_experts.into_iter().for_each(|name| *name = None);
            names.router = RouterTensors { proj: None, scale: None, per_expert_scale: None };
        }
        let Layer { projections, norms: has, biases, scalars, router, kept, altup } = &names;
        let per_layer_width = sizes.per_layer.map_or(0, |(width, _)| width);
        let rank = sizes.laurel_rank.unwrap_or(0);
        let coefficients = |rows, cols, shape_in_config| {
            (vec![rows, cols], shape_in_config, Role::Coefficients, Class::Norms)
        };
        let kept_matrix =
            |rows, cols, shape_in_config| (vec![rows, cols], shape_in_config, Role::KeptMatrix, Class::Ffn);
        const EXPERT_ROWS: &str = "num_experts, moe_intermediate_size, hidden_size";
        let shapes = Layer {
            projections: Projections {
                q_proj: matrix(q, hidden, Q_ROWS, Qkv, Class::Attention),
                k_proj: projections.k_proj.map(|_| matrix(kv, hidden, KV_ROWS, Qkv, Class::Attention)),
                v_proj: projections.v_proj.map(|_| matrix(kv, hidden, KV_ROWS, Qkv, Class::Attention)),
                o_proj: matrix(
                    hidden,
                    q,
                    "hidden_size, num_attention_heads * head_dim",
                    Output,
                    Class::Attention,
                ),
                gate_proj: projections.gate_proj.map(|_| matrix(ffn, hidden, FFN_ROWS, GateUp, Class::Ffn)),
                up_proj: projections.up_proj.map(|_| matrix(ffn, hidden, FFN_ROWS, GateUp, Class::Ffn)),
                down_proj: projections
                    .down_proj
                    .map(|_| matrix(hidden, ffn, "hidden_size, intermediate_size", Down, Class::Ffn)),
                expert_gate_proj: projections
                    .expert_gate_proj
                    .map(|_| of_experts(expert_ffn, hidden, EXPERT_ROWS, ExpertGateUp)),
                expert_up_proj: projections
                    .expert_up_proj
                    .map(|_| of_experts(expert_ffn, hidden, EXPERT_ROWS, ExpertGateUp)),
                expert_down_proj: projections.expert_down_proj.map(|_| {
                    const ROWS: &str = "num_experts, hidden_size, moe_intermediate_size";
                    of_experts(hidden, expert_ffn, ROWS, ExpertDown)
                }),
            },
            norms: Norms {
                input_layernorm: norm(hidden, "hidden_size"),
                post_attention_layernorm: has.post_attention_layernorm.map(|_| norm(hidden, "hidden_size")),
                pre_feedforward_layernorm: norm(hidden, "hidden_size"),
                post_feedforward_layernorm: has
                    .post_feedforward_layernorm
                    .map(|_| norm(hidden, "hidden_size")),
                q_norm: has.q_norm.map(|_| norm(head_dim, "head_dim")),
                k_norm: has.k_norm.map(|_| norm(head_dim, "head_dim")),
                post_feedforward_layernorm_1: has
                    .post_feedforward_layernorm_1
                    .map(|_| norm(hidden, "hidden_size")),
                pre_feedforward_layernorm_2: has
                    .pre_feedforward_layernorm_2
                    .map(|_| norm(hidden, "hidden_size")),
                post_feedforward_layernorm_2: has
                    .post_feedforward_layernorm_2
                    .map(|_| norm(hidden, "hidden_size")),
                post_per_layer_input_norm: has.post_per_layer_input_norm.map(|_| norm(hidden, "hidden_size")),
                post_laurel_norm: has.post_laurel_norm.map(|_| norm(hidden, "hidden_size")),
                router_norm: has.router_norm.map(|_| norm(hidden, "hidden_size")),
            },
            biases: Biases {
                q_proj: biases.q_proj.map(|_| bias(q, "num_attention_heads * head_dim")),
                k_proj: biases.k_proj.map(|_| bias(kv, "num_key_value_heads * head_dim")),
                v_proj: biases.v_proj.map(|_| bias(kv, "num_key_value_heads * head_dim")),
            },
            scalars: Scalars { layer_scalar: scalars.layer_scalar.map(|_| factors(1, "1")) },
            router: RouterTensors {
                proj: router
                    .proj
                    .map(|_| (vec![experts, hidden], "num_experts, hidden_size", Role::Router, Class::Norms)),
                scale: router.scale.map(|_| factors(hidden, "hidden_size")),
                per_expert_scale: router.per_expert_scale.map(|_| factors(experts, "num_experts")),
            },
            kept: KeptMatrices {
                per_layer_input_gate: kept.per_layer_input_gate.map(|_| {
                    kept_matrix(per_layer_width, hidden, "hidden_size_per_layer_input, hidden_size")
                }),
                per_layer_projection: kept.per_layer_projection.map(|_| {
                    kept_matrix(hidden, per_layer_width, "hidden_size, hidden_size_per_layer_input")
                }),
                linear_left: kept.linear_left.map(|_| kept_matrix(rank, hidden, "laurel_rank, hidden_size")),
                linear_right: kept
                    .linear_right
                    .map(|_| kept_matrix(hidden, rank, "hidden_size, laurel_rank")),
            },
            altup: AltUpTensors {
                modality_router: altup
                    .modality_router
                    .map(|_| coefficients(STREAMS, hidden, "altup_num_inputs, hidden_size")),
                prediction_coefs: altup.prediction_coefs.map(|_| {
                    const ROWS: &str = "altup_num_inputs * altup_num_inputs, altup_num_inputs";
                    coefficients(STREAMS * STREAMS, STREAMS, ROWS)
                }),
                correction_coefs: altup
                    .correction_coefs
                    .map(|_| coefficients(STREAMS, STREAMS, "altup_num_inputs, altup_num_inputs")),
                correct_output_scale: altup.correct_output_scale.map(|_| factors(hidden, "hidden_size")),
            },
        };
        names.zip(shapes).map(|(names, (shape, shape_in_config, role, class))| TensorSpec {
            name: format!("layers.{layer}.{}", names.hugging_face),
            shape,
            shape_in_config,
            role,
            class,
            layer: Some(layer),
        })
    }
}

/// One value for each tensor of a model, in the order in which they are loaded and written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensors<T> {
    pub embed_tokens: T,
    /// The norm after the last layer.
    pub norm: T,
    /// The matrix of the logits; `None` = the embedding.
    pub lm_head: Option<T>,
    /// What computes the per-layer embeddings of a token.
    pub per_layer: Option<PerLayerEmbeddings<T>>,
    /// What makes several residual streams from an embedding, and brings them together.
    pub streams: Option<StreamProjections<T>>,
    pub layers: Vec<Layer<T>>,
}

impl<T> ModelTensors<T> {
    /// The values outside of the layers.
    fn shared(&self) -> impl Iterator<Item = &T> {
        let per_layer = self.per_layer.iter().flat_map(PerLayerEmbeddings::iter);
        let streams = self.streams.iter().flat_map(StreamProjections::iter);
        [&self.embed_tokens, &self.norm].into_iter().chain(&self.lm_head).chain(per_layer).chain(streams)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.shared().chain(self.layers.iter().flat_map(Layer::iter))
    }

    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> ModelTensors<U> {
        ModelTensors {
            embed_tokens: f(self.embed_tokens),
            norm: f(self.norm),
            lm_head: self.lm_head.map(&mut f),
            per_layer: self.per_layer.map(|per_layer| per_layer.map(&mut f)),
            streams: self.streams.map(|streams| streams.map(&mut f)),
            layers: self.layers.into_iter().map(|layer| layer.map(&mut f)).collect(),
        }
    }

    pub fn as_ref(&self) -> ModelTensors<&T> {
        ModelTensors {
            embed_tokens: &self.embed_tokens,
            norm: &self.norm,
            lm_head: self.lm_head.as_ref(),
            per_layer: self.per_layer.as_ref().map(PerLayerEmbeddings::as_ref),
            streams: self.streams.as_ref().map(StreamProjections::as_ref),
            layers: self.layers.iter().map(Layer::as_ref).collect(),
        }
    }

    /// The values in groups that a native checkpoint stores in one file, with the names of the files.
    pub fn files(&self) -> Vec<(String, Vec<&T>)> {
        let shared = ("shared.safetensors".to_owned(), self.shared().collect());
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(i, layer)| (format!("layer-{i:03}.safetensors"), layer.iter().collect()));
        std::iter::once(shared).chain(layers).collect()
    }

    /// The values of both, in pairs. Panics if the models differ in their layers or optional tensors.
    pub fn zip<U>(self, other: ModelTensors<U>) -> ModelTensors<(T, U)> {
        assert_eq!(self.layers.len(), other.layers.len(), "layers");
        assert_eq!(self.lm_head.is_some(), other.lm_head.is_some(), "heads");
        assert_eq!(self.per_layer.is_some(), other.per_layer.is_some(), "per-layer embeddings");
        assert_eq!(self.streams.is_some(), other.streams.is_some(), "residual streams");
        ModelTensors {
            embed_tokens: (self.embed_tokens, other.embed_tokens),
            norm: (self.norm, other.norm),
            lm_head: self.lm_head.zip(other.lm_head),
            per_layer: self.per_layer.zip(other.per_layer).map(|(a, b)| a.zip(b)),
            streams: self.streams.zip(other.streams).map(|(a, b)| a.zip(b)),
            layers: self.layers.into_iter().zip(other.layers).map(|(a, b)| a.zip(b)).collect(),
        }
    }
}
