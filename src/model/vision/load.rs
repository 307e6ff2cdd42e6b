//! The load of a tower.

use std::sync::Arc;

use super::request::{Stored, TowerRequest};
use super::spec::{Encoder, Transformer, VisionTensor};
use super::tower::{DeviceEncoder, DeviceLayer, DeviceTransformer, LayerScratch, Network, Scratch, Tower};
use crate::checkpoint::{Encoding, Tensor};
use crate::gpu::{Arena, Buffer, CommandBuffer, Device, GpuError, Uploader};
use crate::kernels::{
    Activations, Attention, AttentionShape, GridTables, Kernels, KvCache, LayerNorm, Matrices, Matrix,
    Partials, Quantized, RmsNorm, ShareArrays, Standardize, StepArrays, Tiles, UploadError, VisionKernels,
};
use crate::model::ImageSizes;
use crate::quantize::{Rounding, pack_tiles};
use crate::tensor::{DType, TILE_ROWS};

/// The epsilon of the LayerNorms of a tower without a transformer: torch's default.
const LAYER_NORM_EPS: f32 = 1e-5;

/// What a load of a tower needs besides its weights.
pub(in crate::model) struct TowerLoad<'a, 'b> {
    pub device: &'a Arc<Device>,
    pub request: TowerRequest<'a>,
    pub max_batch_tokens: usize,
    pub arena: &'a mut Arena,
    pub uploader: &'a mut Uploader<'b, UploadError>,
    /// How the language model divides its products.
    pub tiles: Tiles,
    /// As [`crate::checkpoint::Checkpoint::has_gguf_layout`].
    pub has_gguf_layout: bool,
}

impl TowerLoad<'_, '_> {
    /// Loads a tower. `tensors` are those of [`VisionSpec::tensors`](super::VisionSpec::tensors), and `read` returns the
    /// values of one.
    pub fn run<E: From<UploadError> + From<GpuError>>(
        self,
        tensors: Vec<Tensor<'_>>,
        read: &mut dyn FnMut(&Tensor<'_>) -> Result<Vec<f32>, E>,
    ) -> Result<Tower, E> {
        let TowerLoad { device, request, max_batch_tokens, arena, uploader, tiles, has_gguf_layout } = self;
        let spec = request.spec;
        let buffers = request
            .requests(max_batch_tokens)
            .into_iter()
            .map(|one| arena.alloc(one.kind, one.class, one.bytes, &one.name));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let mut load = Filling { request, buffers: buffers.into_iter(), uploader };
        let mut weights = Vec::new();
        for (wanted, tensor) in spec.tensors().iter().zip(&tensors) {
            let values = read(tensor)?;
            weights.push(load.tensor(wanted, values, (max_batch_tokens, has_gguf_layout))?);
        }
        let mut weights = Weights { each: weights.into_iter(), eps: spec.norm_eps };

        let layers = spec.transformer();
        let kind = request.layer_kind();
        let matrices = Matrices {
            layers: kind,
            products: vec![request.scheme],
            tiles: Some(tiles),
            ..Matrices::default()
        };
        let kernels = Kernels::new(device, &matrices, request.heads().as_slice(), request.precision)?;
        let own_kernels = VisionKernels::new(device, kernels.tiles(), kind.activation)?;

        let (hidden, elements) = (spec.hidden_size, spec.patch_elements());
        let ones = load.vector(&vec![1.0f32; hidden.max(elements)])?;
        let zeros = load.vector(&vec![0.0f32; hidden.max(elements)])?;
        let scratch = Scratch {
            patches: load.floats(elements),
            patch_blocks: load.blocks(elements),
            hidden: load.floats(hidden),
            normed: load.floats(hidden),
            normed_blocks: load.blocks(hidden),
            pooled: load.floats(hidden),
            pooled_normed: load.floats(hidden),
            pooled_blocks: load.blocks(hidden),
        };
        let embeddings = load.floats(spec.text_hidden_size);
        let pixels = load.next();

        let (arrays, normed_patches) = match layers {
            Some(layers) => (Some(load.arrays(layers, max_batch_tokens)?), None),
            None => (None, Some(load.floats(elements))),
        };
        assert!(load.buffers.next().is_none(), "a buffer of the tower that nothing uses");

        // The norm before the projection has no factors in some towers.
        let mut norm = RmsNorm { weight: ones, eps: spec.norm_eps };
        let (patch_embedding, encoder) = match &spec.encoder {
            Encoder::LayerNorms(layers) => {
                let patch_embedding = weights.matrix();
                let (patch_bias, positions) = (weights.vector(), weights.vector());
                let arrays = arrays.expect("a transformer");
                let q_scale = (layers.head_dim as f64).powf(-0.5) as f32;
                let each = (0..layers.num_hidden_layers).map(|_| weights.plain_layer(&arrays, q_scale));
                let layers = each.collect();
                let post_layernorm = weights.layer_norm(spec.norm_eps);
                norm.weight = weights.vector();
                let layers = DeviceTransformer { layers, scratch: arrays.scratch, step: arrays.step };
                (patch_embedding, DeviceEncoder::LayerNorms { layers, patch_bias, positions, post_layernorm })
            }
            Encoder::RmsNorms { layers, standardizes, .. } => {
                let (patch_embedding, positions) = (weights.matrix(), weights.grid(hidden));
                let arrays = arrays.expect("a transformer");
                let head_eps = (f64::from(spec.norm_eps) * request.share_of_head()) as f32;
                let each = (0..layers.num_hidden_layers).map(|_| weights.gated_layer(&arrays, head_eps));
                let layers = each.collect();
                let factor = (hidden as f64).sqrt() as f32;
                let standardize = standardizes.then(|| Standardize {
                    factor,
                    bias: weights.vector(),
                    scale: weights.vector(),
                });
                if standardize.is_none() {
                    // The means are not multiplied by the factor, because the norm divides it out.
                    norm.eps /= hidden as f32;
                }
                let rotations = arrays.rotations.expect("an axial RoPE");
                let rope = Activations::new(arrays.rope, request.head_dim());
                let layers = DeviceTransformer { layers, scratch: arrays.scratch, step: arrays.step };
                let encoder = DeviceEncoder::RmsNorms { layers, positions, rotations, rope, standardize };
                (patch_embedding, encoder)
            }
            Encoder::Linear { .. } => {
                let patch_norm = weights.layer_norm(LAYER_NORM_EPS);
                let (patch_embedding, bias) = (weights.matrix(), weights.vector());
                let (dense_norm, positions) = (weights.layer_norm(LAYER_NORM_EPS), weights.grid(hidden));
                let position_norm = weights.layer_norm(LAYER_NORM_EPS);
                let normed_patches = normed_patches.expect("no transformer");
                let encoder = DeviceEncoder::Linear {
                    patch_norm,
                    normed_patches,
                    bias,
                    dense_norm,
                    positions,
                    position_norm,
                    zeros,
                };
                (patch_embedding, encoder)
            }
        };
        let projection = weights.matrix();
        assert!(weights.each.next().is_none(), "a tensor of the tower that nothing uses");

        let mut tower = Tower {
            device: Arc::clone(device),
            spec: spec.clone(),
            kernels,
            own_kernels,
            patch_embedding,
            encoder,
            norm,
            projection,
            scratch,
            pixels,
            embeddings,
            limits: request.limits(max_batch_tokens).expect("a load has room for an image"),
            recorded_for: None,
            recorded: Vec::new(),
            closing: Some(CommandBuffer::new(device, "vision: projection")?),
            submissions: Vec::new(),
        };
        if let ImageSizes::Fixed { side } = spec.sizes {
            tower.prepare([side; 2])?;
        }
        Ok(tower)
    }
}

/// A tensor on the device.
enum OnDevice {
    Matrix(Matrix),
    Vectors(Vec<Buffer>),
}

/// The tensors of a tower in the order of its description.
struct Weights {
    each: std::vec::IntoIter<OnDevice>,
    eps: f32,
}

impl Weights {
    fn matrix(&mut self) -> Matrix {
        match self.each.next() {
            Some(OnDevice::Matrix(matrix)) => matrix,
            _ => panic!("the next tensor is no matrix"),
        }
    }

    fn vectors<const N: usize>(&mut self) -> [Buffer; N] {
        match self.each.next() {
            Some(OnDevice::Vectors(vectors)) => {
                vectors.try_into().unwrap_or_else(|_| panic!("another number of vectors"))
            }
            _ => panic!("the next tensor is no vector"),
        }
    }

    fn vector(&mut self) -> Buffer {
        let [vector] = self.vectors();
        vector
    }

    fn grid(&mut self, width: usize) -> GridTables {
        let [of_columns, of_rows] = self.vectors().map(|table| Activations::new(table, width));
        GridTables { of_columns, of_rows }
    }

    fn layer_norm(&mut self, eps: f32) -> LayerNorm {
        LayerNorm { weight: self.vector(), bias: self.vector(), eps }
    }

    fn rms_norm(&mut self) -> RmsNorm {
        RmsNorm { weight: self.vector(), eps: self.eps }
    }

    fn plain_layer(&mut self, arrays: &Arrays, q_scale: f32) -> DeviceLayer {
        let first_norm = self.layer_norm(self.eps);
        let [(q, q_bias), (k, k_bias), (v, v_bias)] = [(); 3].map(|()| (self.matrix(), self.vector()));
        let (out, out_bias) = (self.matrix(), self.vector());
        let norms = [first_norm, self.layer_norm(self.eps)];
        let [fc1, fc2] = [(); 2].map(|()| (self.matrix(), self.vector()));
        let attention = arrays.attention(self.eps);
        DeviceLayer {
            qkv: [q, k, v],
            attention: Attention { biases: Some([q_bias, k_bias, v_bias]), q_scale, ..attention },
            out,
            network: Network::Plain { norms, out_bias, fc1, fc2 },
        }
    }

    /// `head_eps` is the epsilon of the norms of heads.
    fn gated_layer(&mut self, arrays: &Arrays, head_eps: f32) -> DeviceLayer {
        let input = self.rms_norm();
        let qkv = [(); 3].map(|()| self.matrix());
        let qk_norms = Some([(); 2].map(|()| RmsNorm { weight: self.vector(), eps: head_eps }));
        let out = self.matrix();
        let [post_attention, pre_feedforward] = [(); 2].map(|()| self.rms_norm());
        let [gate, up, down] = [(); 3].map(|()| self.matrix());
        let norms = [input, post_attention, pre_feedforward, self.rms_norm()];
        DeviceLayer {
            qkv,
            attention: Attention { qk_norms, ..arrays.attention(head_eps) },
            out,
            network: Network::Gated { norms, gate, up, down },
        }
    }
}

/// What the layers of a transformer share.
struct Arrays {
    shape: AttentionShape,
    rope: Buffer,
    rotations: Option<GridTables>,
    cache: KvCache,
    scratch: LayerScratch,
    step: StepArrays,
}

impl Arrays {
    /// Attention without norms and biases. `eps` is the epsilon of all norms of heads.
    fn attention(&self, eps: f32) -> Attention {
        Attention {
            shape: self.shape,
            qk_norms: None,
            norm_eps: eps,
            biases: None,
            rope: self.rope.clone(),
            q_scale: 1.0,
            shares_cache: false,
            cache: self.cache.clone(),
        }
    }
}

/// Takes the buffers of a tower in their order, and fills them.
struct Filling<'a, 'b, 'c> {
    request: TowerRequest<'a>,
    buffers: std::vec::IntoIter<Buffer>,
    uploader: &'c mut Uploader<'b, UploadError>,
}

impl Filling<'_, '_, '_> {
    fn next(&mut self) -> Buffer {
        self.buffers.next().expect("a buffer was requested for each use")
    }

    fn floats(&mut self, width: usize) -> Activations {
        Activations::new(self.next(), width)
    }

    fn blocks(&mut self, width: usize) -> Quantized {
        Quantized::new(self.next(), width)
    }

    fn vector<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Result<Buffer, UploadError> {
        let buffer = self.next();
        self.uploader.upload(&buffer, data)?;
        Ok(buffer)
    }

    /// Loads a tensor with these values.
    fn tensor(
        &mut self,
        wanted: &VisionTensor,
        values: Vec<f32>,
        of_load: (usize, bool),
    ) -> Result<OnDevice, UploadError> {
        match self.request.arranged(wanted, values, of_load) {
            Stored::Matrix(size, values) => Ok(OnDevice::Matrix(self.matrix(size, &values)?)),
            Stored::Vectors { each, .. } => {
                let each = each.iter().map(|values| self.vector(values)).collect::<Result<_, _>>()?;
                Ok(OnDevice::Vectors(each))
            }
        }
    }

    /// Packs a matrix in the tower's scheme.
    fn matrix(&mut self, [rows, cols]: [usize; 2], values: &[f32]) -> Result<Matrix, UploadError> {
        let scheme = self.request.scheme;
        let shape = [rows, cols];
        let data: &[u8] = bytemuck::cast_slice(values);
        let encoding = Encoding::Plain { dtype: DType::F32, data };
        let tensor = Tensor { name: "vision", file: "memory", shape: &shape, encoding, interleaved: None };
        let mut blocks = vec![0u8; scheme.block_bytes(rows, cols) as usize];
        let mut scales = vec![0u8; scheme.scale_bytes(rows, cols) as usize];
        let tiles = 0..rows.div_ceil(TILE_ROWS);
        if !self.uploader.discards() {
            pack_tiles(scheme, Rounding::Nearest, &tensor, tiles, &mut blocks, &mut scales)?;
        }
        let blocks = self.vector(&blocks)?;
        let scales = if scales.is_empty() { None } else { Some(self.vector(&scales)?) };
        Ok(Matrix::of_one_shard(scheme, shape, blocks, scales))
    }

    fn arrays(&mut self, layers: &Transformer, max_batch_tokens: usize) -> Result<Arrays, UploadError> {
        let request = self.request;
        let (hidden, heads) = (request.spec.hidden_size, request.heads_width());
        let shape = request.shape(max_batch_tokens);
        let patches = request.most_patches(max_batch_tokens);
        let delta = self.floats(hidden);
        let qkv = [(); 3].map(|()| self.floats(heads));
        let (attended, attended_blocks) = (self.floats(heads), self.blocks(heads));
        let network = self.floats(layers.intermediate_size);
        let network_blocks = self.blocks(layers.intermediate_size);
        let partials = self.floats(shape.partial_width());
        let cache = KvCache { keys: self.next(), values: self.next() };

        // The patches are the tokens of one sequence.
        let all: Vec<u32> = (0..patches as u32).collect();
        let theta = match request.spec.encoder {
            Encoder::RmsNorms { theta, .. } => Some(theta),
            _ => None,
        };
        let first = self.vector(&vec![0u32; patches])?;
        let slot_mapping = self.vector(&all)?;
        // The rope table has a row for each patch, or one for all of them.
        let positions = if theta.is_some() { &slot_mapping } else { &first }.clone();
        let block_tables = self.vector(&all[..shape.max_blocks])?;
        let (rope, rotations, up) = match theta {
            Some(theta) => {
                let [of_columns, of_rows] = request.rope_tables(theta, max_batch_tokens);
                let mut table = |values: &[f32]| {
                    Ok::<_, UploadError>(Activations::new(self.vector(values)?, request.head_dim()))
                };
                let rotations = GridTables { of_columns: table(&of_columns)?, of_rows: table(&of_rows)? };
                (self.next(), Some(rotations), Some(self.floats(layers.intermediate_size)))
            }
            None => {
                let row: Vec<f32> = [1.0, 0.0].into_iter().cycle().take(request.head_dim()).collect();
                (self.vector(&row)?, None, None)
            }
        };
        let (items, groups, merges) = (self.next(), self.next(), self.next());
        Ok(Arrays {
            shape,
            rope,
            rotations,
            cache,
            scratch: LayerScratch {
                delta,
                qkv,
                attended,
                attended_blocks,
                network,
                up,
                network_blocks,
                partials: Partials { single: partials.clone(), tiles: partials },
            },
            step: StepArrays {
                ids: first.clone(),
                positions,
                sequence_of: first,
                slot_mapping,
                block_tables,
                shares: ShareArrays { single: None, tiles: Some(items), groups, merges },
            },
        })
    }
}
