//! The table of a model's tensors: name, shape, role and place of each.
//!
//! Everything that lists a model's weights reads this table: the check of a checkpoint, the memory plan, the load, the
//! writer of native checkpoints, and the reports. [`Layer`] holds one value per tensor of a layer, by name.

use std::ops::Index;

use crate::gpu::placement::Class;

/// A tensor that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name without the prefix of the language model and without `.weight`, such as
    /// `layers.3.self_attn.q_proj`.
    pub name: String,
    /// `[out, in]` of a matrix, `[n]` of a norm.
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
    /// A matrix whose rows are embeddings, and which also computes the logits.
    Embedding,
    /// A matrix that multiplies the activations of a group.
    Projection(InputGroup),
    Norm,
}

/// The matrices of a layer that multiply the same activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputGroup {
    Qkv,
    Output,
    GateUp,
    Down,
}

impl TensorSpec {
    /// The name in checkpoints of the text model alone, such as `model.layers.3.self_attn.q_proj.weight`.
    pub fn full_name(&self) -> String {
        format!("model.{}.weight", self.name)
    }

    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Columns of a matrix. Panics for a norm.
    pub fn cols(&self) -> usize {
        self.shape[1]
    }
}

macro_rules! one_value_each {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name<T> {
            $($(#[$field_doc])* pub $field: T,)+
        }

        impl<T> $name<T> {
            /// The result of `f` for each value, in the order of the fields.
            pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> $name<U> {
                $name { $($field: f(self.$field),)+ }
            }

            /// As `map`; ends at the first error.
            pub fn try_map<U, E>(self, mut f: impl FnMut(T) -> Result<U, E>) -> Result<$name<U>, E> {
                Ok($name { $($field: f(self.$field)?,)+ })
            }

            /// The values of both, in pairs.
            pub fn zip<U>(self, other: $name<U>) -> $name<(T, U)> {
                $name { $($field: (self.$field, other.$field),)+ }
            }

            pub fn as_ref(&self) -> $name<&T> {
                $name { $($field: &self.$field,)+ }
            }

            /// The values in the order of the fields.
            pub fn iter(&self) -> impl Iterator<Item = &T> {
                [$(&self.$field,)+].into_iter()
            }
        }

        impl<T> IntoIterator for $name<T> {
            type Item = T;
            type IntoIter = std::vec::IntoIter<T>;

            fn into_iter(self) -> Self::IntoIter {
                vec![$(self.$field,)+].into_iter()
            }
        }
    };
}

one_value_each! {
    /// One value for each matrix of a layer.
    Projections { q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj }
}

one_value_each! {
    /// One value for each norm of a layer.
    Norms {
        input_layernorm,
        post_attention_layernorm,
        pre_feedforward_layernorm,
        post_feedforward_layernorm,
        q_norm,
        k_norm,
    }
}

one_value_each! {
    /// One value for each group of matrices that have the same input.
    Inputs { qkv, output, gate_up, down }
}

impl<T> Index<InputGroup> for Inputs<T> {
    type Output = T;

    fn index(&self, group: InputGroup) -> &T {
        match group {
            InputGroup::Qkv => &self.qkv,
            InputGroup::Output => &self.output,
            InputGroup::GateUp => &self.gate_up,
            InputGroup::Down => &self.down,
        }
    }
}

/// One value for each tensor of a layer. Norms may have another type than matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Layer<M, N = M> {
    pub projections: Projections<M>,
    pub norms: Norms<N>,
}

impl<T> Layer<T> {
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Layer<U> {
        Layer { projections: self.projections.map(&mut f), norms: self.norms.map(f) }
    }

    pub fn zip<U>(self, other: Layer<U>) -> Layer<(T, U)> {
        Layer { projections: self.projections.zip(other.projections), norms: self.norms.zip(other.norms) }
    }

    pub fn as_ref(&self) -> Layer<&T> {
        Layer { projections: self.projections.as_ref(), norms: self.norms.as_ref() }
    }

    /// The values of the matrices, then those of the norms.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.projections.iter().chain(self.norms.iter())
    }
}

impl Projections<TensorSpec> {
    /// The number of elements of each group's input.
    pub fn input_widths(&self) -> Inputs<usize> {
        Inputs {
            qkv: self.q_proj.cols(),
            output: self.o_proj.cols(),
            gate_up: self.gate_proj.cols(),
            down: self.down_proj.cols(),
        }
    }
}

/// One value for each tensor of a model, in the order in which they are loaded and written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensors<T> {
    pub embed_tokens: T,
    /// The norm after the last layer.
    pub norm: T,
    pub layers: Vec<Layer<T>>,
}

impl<T> ModelTensors<T> {
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.embed_tokens, &self.norm].into_iter().chain(self.layers.iter().flat_map(Layer::iter))
    }

    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> ModelTensors<U> {
        ModelTensors {
            embed_tokens: f(self.embed_tokens),
            norm: f(self.norm),
            layers: self.layers.into_iter().map(|layer| layer.map(&mut f)).collect(),
        }
    }

    pub fn as_ref(&self) -> ModelTensors<&T> {
        ModelTensors {
            embed_tokens: &self.embed_tokens,
            norm: &self.norm,
            layers: self.layers.iter().map(Layer::as_ref).collect(),
        }
    }

    /// The values in groups that a native checkpoint stores in one file, with the names of the files.
    pub fn files(&self) -> Vec<(String, Vec<&T>)> {
        let shared = ("shared.safetensors".to_owned(), vec![&self.embed_tokens, &self.norm]);
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(i, layer)| (format!("layer-{i:03}.safetensors"), layer.iter().collect()));
        std::iter::once(shared).chain(layers).collect()
    }

    /// The values of both, in pairs. Panics if the numbers of layers differ.
    pub fn zip<U>(self, other: ModelTensors<U>) -> ModelTensors<(T, U)> {
        assert_eq!(self.layers.len(), other.layers.len(), "layers");
        ModelTensors {
            embed_tokens: (self.embed_tokens, other.embed_tokens),
            norm: (self.norm, other.norm),
            layers: self.layers.into_iter().zip(other.layers).map(|(a, b)| a.zip(b)).collect(),
        }
    }
}
