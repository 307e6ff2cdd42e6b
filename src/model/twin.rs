//! The forward pass on the CPU: the reference values of each layer of a checkpoint for a fixed prompt.
//!
//! It checks devices, and serves no requests: `unicorn quantize` stores its results with the weights, and a device that
//! computes other values does not serve. It shares no code with the code that it checks, except the frequencies of RoPE,
//! which are numbers of the config. Values are f64 between
//! products, and f32 where the device has f32. Matrices are read row by row, on all cores. Memory holds one row per
//! core, and the activations of a few tokens.
//!
//! Two passes run side by side: an exact one, and one with the roundings that serving may apply. These round the inputs
//! of integer matrices to int8 as `fast` does, and keys and values to int8. A device may deviate by the difference
//! between the two passes, times [`MARGIN`].

use std::collections::HashMap;

use rayon::prelude::*;

use super::spec::{LayerSpec, Mixture, ModelSpec, NormWeight};
use super::tensors::{Layer, Projections};
use super::weights::Weights;
use crate::checkpoint::{Checkpoint, CheckpointError, Deviation, Expected, LayerValues, Tensor};
use crate::kernels::{Experts, HiddenAct, STREAMS};
use crate::tensor::Precision;

/// The most tokens of the prompt.
const TOKENS: usize = 24;
/// Logits that are stored.
const LOGITS: usize = 256;
/// A device may deviate by the error of the serving roundings, times this factor, plus the largest error of rounding to
/// f32 in another order.
const MARGIN: f64 = 4.0;
const ROUNDING: Deviation = Deviation { relative: 1e-4, largest: 1e-3 };
/// Columns that share a scale in int8, and the least sum of magnitudes of a block that needs no second digit.
const BLOCK: usize = 32;
const LEAST_MAGNITUDES: f32 = 14.0 * 32.0;

/// What the layers of a checkpoint compute for the prompt of the check. `each` is called with the bytes of weights that
/// were read since the last call.
pub fn layer_values(
    checkpoint: &Checkpoint,
    weights: &Weights<'_>,
    config: &ModelSpec,
    each: &mut dyn FnMut(u64),
) -> Result<LayerValues, CheckpointError> {
    values_of(checkpoint, weights, config, prompt(config), LOGITS.min(config.vocab_size), each)
}

/// What the layers compute for `tokens`, and `logits` of the logits after the last token.
pub fn values_of(
    checkpoint: &Checkpoint,
    weights: &Weights<'_>,
    config: &ModelSpec,
    tokens: Vec<u32>,
    logits: usize,
    each: &mut dyn FnMut(u64),
) -> Result<LayerValues, CheckpointError> {
    let twin = Twin { checkpoint, config, tokens: tokens.len() };
    let mut rows: Vec<[Vec<f32>; 2]> = Vec::new();
    let mut keep = |hidden: &[Vec<f64>]| {
        let last = |pass: usize| &hidden[(pass + 1) * tokens.len() - 1];
        rows.push([0, 1].map(|pass| last(pass).iter().map(|x| *x as f32).collect()));
    };

    let scale = f64::from(config.embed_scale);
    let mut hidden = Vec::new();
    for id in tokens.iter().chain(&tokens) {
        let row = weights.tensors.embed_tokens.rows_f32(*id as usize..*id as usize + 1)?;
        hidden.push(row.into_iter().map(|x| f64::from(x) * scale).collect());
    }
    keep(&hidden);
    let per_layer = twin.per_layer_embeddings(weights, &tokens, &hidden)?;
    let mut streams = twin.spread(weights, &hidden)?;
    let mut cache = Cache::new();
    for (i, (layer, spec)) in weights.tensors.layers.iter().zip(&config.layers).enumerate() {
        match &mut streams {
            Some(streams) => {
                twin.layer_of_streams(layer, (i, spec), &per_layer, &mut cache, &mut hidden, streams)?
            }
            None => twin.layer(layer, (i, spec), &per_layer, &mut cache, &mut hidden)?,
        }
        keep(&hidden);
        each(layer.projections.iter().map(|tensor| tensor.stored_bytes()).sum());
        // Each tensor is read only once, and the file may be as large as memory.
        layer.projections.iter().for_each(|tensor| checkpoint.release(tensor));
    }
    if let Some(streams) = &streams {
        twin.merge(weights, &mut hidden, streams)?;
    }
    let last: Vec<Vec<f64>> =
        [0, 1].map(|pass| hidden[(pass + 1) * tokens.len() - 1].clone()).into_iter().collect();
    let normed = twin.normed(&last, &weights.tensors.norm)?;
    let ids: Vec<usize> = LayerValues::logit_ids(logits, config.vocab_size).collect();
    let logits = Twin { tokens: 1, ..twin }.products(weights.head(), &normed, &ids)?;
    let capped = |x: f64| match config.final_logit_softcap.map(f64::from) {
        Some(cap) => cap * (x / cap).tanh(),
        None => x,
    };
    let [exact, rounded] = [0, 1].map(|pass| logits[pass].iter().map(|x| capped(*x) as f32).collect());
    let expected = |[exact, rounded]: [Vec<f32>; 2]| {
        let Deviation { relative, largest } = Deviation::of(&rounded, &exact);
        let tolerance = Deviation {
            relative: MARGIN * relative + ROUNDING.relative,
            largest: MARGIN * largest + ROUNDING.largest,
        };
        Expected { values: exact, tolerance }
    };
    Ok(LayerValues {
        tokens,
        residual: rows.into_iter().map(expected).collect(),
        logits: expected([exact, rounded]),
    })
}

/// Ids from the whole vocabulary.
fn prompt(config: &ModelSpec) -> Vec<u32> {
    let id = |i: usize| ((i * i * 7919 + i * 31) % config.vocab_size) as u32;
    let first = config.bos_token_id.unwrap_or(0);
    std::iter::once(first).chain((1..TOKENS.min(config.max_position_embeddings)).map(id)).collect()
}

/// The keys and values of layers, by the layer's number.
type Cache = HashMap<usize, [Vec<Vec<f64>>; 2]>;

/// The residual streams besides the first one.
type Streams = [Vec<Vec<f64>>; STREAMS - 1];

/// Rows of activations: first those of the exact pass, then those of the rounded pass.
#[derive(Clone, Copy)]
struct Twin<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a ModelSpec,
    /// Rows of each pass.
    tokens: usize,
}

impl Twin<'_> {
    fn layer(
        &self,
        layer: &Layer<Tensor<'_>>,
        (index, spec): (usize, &LayerSpec),
        per_layer: &[Vec<f64>],
        cache: &mut Cache,
        hidden: &mut [Vec<f64>],
    ) -> Result<(), CheckpointError> {
        let Layer { projections, norms, .. } = layer;
        let normed = self.normed(hidden, &norms.input_layernorm)?;
        add(hidden, &self.attended(layer, (index, spec), cache, &normed)?);
        let normed = self.normed(hidden, &norms.pre_feedforward_layernorm)?;
        let mut result = match self.dense_network(projections, spec, &normed)? {
            Some(result) => result,
            None => vec![vec![0.0; self.config.hidden_size]; hidden.len()],
        };
        if let Some(mixture) = self.config.mixture.filter(|_| layer.router.proj.is_some()) {
            result = self.post_normed(result, norms.post_feedforward_layernorm_1.as_ref())?;
            let sum = self.experts(layer, &mixture, hidden, &normed)?;
            add(&mut result, &self.post_normed(sum, norms.post_feedforward_layernorm_2.as_ref())?);
        }
        add(hidden, &self.post_normed(result, norms.post_feedforward_layernorm.as_ref())?);
        if let Some(result) = self.per_layer_input(layer, index, per_layer, hidden)? {
            add(hidden, &result);
        }
        if let Some(scalar) = &layer.scalars.layer_scalar {
            let scalar = f64::from(self.checkpoint.read_f32(scalar)?[0]);
            hidden.iter_mut().flatten().for_each(|x| *x *= scalar);
        }
        Ok(())
    }

    /// A layer of a model with several residual streams, of which `hidden` is the first.
    fn layer_of_streams(
        &self,
        layer: &Layer<Tensor<'_>>,
        (index, spec): (usize, &LayerSpec),
        per_layer: &[Vec<f64>],
        cache: &mut Cache,
        hidden: &mut [Vec<f64>],
        streams: &mut Streams,
    ) -> Result<(), CheckpointError> {
        let Layer { projections, norms, kept, altup, .. } = layer;
        let wanted = "a tensor of layers with several residual streams";
        let coefficients = |tensor: &Option<Tensor<'_>>| -> Result<Vec<f64>, CheckpointError> {
            let values = self.checkpoint.read_f32(tensor.as_ref().expect(wanted))?;
            Ok(values.into_iter().map(f64::from).collect())
        };

        let prediction = coefficients(&altup.prediction_coefs)?;
        let numbers = self.altup_numbers(layer, hidden)?;
        for (row, numbers) in numbers.iter().enumerate() {
            for column in 0..hidden[row].len() {
                let [second, third, fourth] = &*streams;
                let before =
                    [hidden[row][column], second[row][column], third[row][column], fourth[row][column]];
                let predicted = |i: usize| {
                    let factor = |j: usize| dot_f64(&prediction[STREAMS * (STREAMS * i + j)..], numbers);
                    before[i] + (0..STREAMS).map(|j| factor(j) * before[j]).sum::<f64>()
                };
                hidden[row][column] = predicted(0);
                for (i, stream) in (1..).zip(streams.iter_mut()) {
                    stream[row][column] = predicted(i);
                }
            }
        }

        let active = hidden.to_vec();
        let normed = self.normed(hidden, &norms.input_layernorm)?;
        add(hidden, &normed);
        let laurel = self.product(kept.linear_left.as_ref().expect(wanted), &normed)?;
        let laurel = self.product(kept.linear_right.as_ref().expect(wanted), &laurel)?;
        add(hidden, &self.post_normed(laurel, norms.post_laurel_norm.as_ref())?);
        add(hidden, &self.attended(layer, (index, spec), cache, &normed)?);
        hidden.iter_mut().flatten().for_each(|x| *x *= std::f64::consts::FRAC_1_SQRT_2);

        let normed = self.normed(hidden, &norms.pre_feedforward_layernorm)?;
        let result = self.dense_network(projections, spec, &normed)?.expect(wanted);
        add(hidden, &self.post_normed(result, norms.post_feedforward_layernorm.as_ref())?);

        let correction = coefficients(&altup.correction_coefs)?;
        let numbers = self.altup_numbers(layer, hidden)?;
        for (row, numbers) in numbers.iter().enumerate() {
            let factor = |i: usize| dot_f64(&correction[STREAMS * i..], numbers) + 1.0;
            for (column, active) in active[row].iter().enumerate() {
                let change = hidden[row][column] - active;
                hidden[row][column] = active + change * factor(0);
                for (i, stream) in (1..).zip(streams.iter_mut()) {
                    stream[row][column] += change * factor(i);
                }
            }
        }
        let scale = coefficients(&altup.correct_output_scale)?;
        let mut first = hidden.to_vec();
        for row in &mut first {
            row.iter_mut().zip(&scale).for_each(|(x, scale)| *x *= scale);
        }
        let result = self.per_layer_input(layer, index, per_layer, &first)?.expect(wanted);
        streams.iter_mut().for_each(|stream| add(stream, &result));
        Ok(())
    }

    /// The result of the dense feed-forward network; `None` in a layer without one.
    fn dense_network(
        &self,
        projections: &Projections<Tensor<'_>>,
        spec: &LayerSpec,
        normed: &[Vec<f64>],
    ) -> Result<Option<Vec<Vec<f64>>>, CheckpointError> {
        let Projections { gate_proj: Some(gate), up_proj: Some(up), down_proj: Some(down), .. } = projections
        else {
            return Ok(None);
        };
        let mut gate = self.product(gate, normed)?;
        if let Some(deviations) = spec.gate_cutoff {
            gate.iter_mut().for_each(|row| cut_off(row, deviations.into()));
        }
        let up = self.product(up, normed)?;
        self.product(down, &self.gated(gate, &up)).map(Some)
    }

    /// The numbers by which coefficients of a layer's update of the streams are weighed, of each row of the first stream.
    fn altup_numbers(
        &self,
        Layer { norms, altup, .. }: &Layer<Tensor<'_>>,
        hidden: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let (norm, router) = (norms.router_norm.as_ref(), altup.modality_router.as_ref());
        let normed = self.normed(hidden, norm.expect("the norm of a router"))?;
        let router = self.checkpoint.read_f32(router.expect("a router"))?;
        let router: Vec<f64> = router.into_iter().map(f64::from).collect();
        let number = |row: &[f64], weights: &[f64]| (dot_f64(weights, row) / row.len() as f64).tanh();
        let of_row =
            |row: &Vec<f64>| router.chunks_exact(row.len()).map(|weights| number(row, weights)).collect();
        Ok(normed.iter().map(of_row).collect())
    }

    /// The other residual streams of embeddings, in a model that has some.
    fn spread(&self, weights: &Weights<'_>, hidden: &[Vec<f64>]) -> Result<Option<Streams>, CheckpointError> {
        let Some(tensors) = &weights.tensors.streams else { return Ok(None) };
        let tensors = tensors.altup_projections.each_ref();
        let mut streams = Streams::default();
        for (stream, matrix) in streams.iter_mut().zip(tensors) {
            *stream = self.product(matrix, hidden)?;
            match_sizes(stream, hidden);
        }
        Ok(Some(streams))
    }

    /// Replaces the first stream by the mean of all.
    fn merge(
        &self,
        weights: &Weights<'_>,
        hidden: &mut [Vec<f64>],
        streams: &Streams,
    ) -> Result<(), CheckpointError> {
        let tensors = weights.tensors.streams.as_ref().expect("tensors of residual streams");
        let target = hidden.to_vec();
        for (stream, matrix) in streams.iter().zip(&tensors.altup_unembed_projections) {
            let mut product = self.product(matrix, stream)?;
            match_sizes(&mut product, &target);
            add(hidden, &product);
        }
        hidden.iter_mut().flatten().for_each(|x| *x /= STREAMS as f64);
        Ok(())
    }

    /// The result of a layer's attention, after its norm. `normed` is the layer's input.
    fn attended(
        &self,
        layer: &Layer<Tensor<'_>>,
        (index, spec): (usize, &LayerSpec),
        cache: &mut Cache,
        normed: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        if spec.kv_source.is_none() {
            cache.insert(index, self.keys_and_values(layer, spec, normed)?);
        }
        let [keys, values] = &cache[&spec.kv_source.unwrap_or(index)];
        let attended = self.attention(layer, spec, normed, [keys, values])?;
        let result = self.product(&layer.projections.o_proj, &attended)?;
        self.post_normed(result, layer.norms.post_attention_layernorm.as_ref())
    }

    /// What a layer's per-layer embeddings contribute to a residual stream, gated by `x`.
    fn per_layer_input(
        &self,
        Layer { kept, norms, .. }: &Layer<Tensor<'_>>,
        index: usize,
        per_layer: &[Vec<f64>],
        x: &[Vec<f64>],
    ) -> Result<Option<Vec<Vec<f64>>>, CheckpointError> {
        let (Some(gate), Some(projection)) = (&kept.per_layer_input_gate, &kept.per_layer_projection) else {
            return Ok(None);
        };
        let gate = self.product(gate, x)?;
        let width = gate[0].len();
        let own: Vec<_> = per_layer.iter().map(|row| row[index * width..][..width].to_vec()).collect();
        let result = self.product(projection, &self.gated(gate, &own))?;
        self.post_normed(result, norms.post_per_layer_input_norm.as_ref()).map(Some)
    }

    /// The per-layer embeddings of each row of the embeddings in `hidden`, whose ids are `tokens`.
    fn per_layer_embeddings(
        &self,
        weights: &Weights<'_>,
        tokens: &[u32],
        hidden: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let (Some(inputs), Some(tensors)) = (self.config.per_layer, &weights.tensors.per_layer) else {
            return Ok(Vec::new());
        };
        let [embed, project, sum] =
            [inputs.embed_scale, inputs.projection_scale, inputs.sum_scale].map(f64::from);
        let weight = self.norm_weight(&tensors.per_layer_projection_norm)?;
        let mut all = self.product(&tensors.per_layer_model_projection, hidden)?;
        for (row, id) in all.iter_mut().zip(tokens.iter().chain(tokens)) {
            row.iter_mut().for_each(|x| *x *= project);
            row.chunks_exact_mut(inputs.width)
                .for_each(|own| normalize(own, &weight, self.config.norm_eps.into()));
            let table = &tensors.embed_tokens_per_layer;
            let id = Some(*id as usize).filter(|id| *id < table.rows()).unwrap_or(0);
            let of_table = table.rows_f32(id..id + 1)?;
            row.iter_mut().zip(of_table).for_each(|(x, table)| *x = (*x + f64::from(table) * embed) * sum);
        }
        Ok(all)
    }

    /// Activated gate products times up products.
    fn gated(&self, mut gate: Vec<Vec<f64>>, up: &[Vec<f64>]) -> Vec<Vec<f64>> {
        for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = match self.config.hidden_act {
                HiddenAct::GeluTanh => gelu(*gate) * up,
                HiddenAct::Silu => *gate / (1.0 + (-*gate).exp()) * up,
            };
        }
        gate
    }

    /// The weighted sums of the experts of each row. Both passes use the experts that the exact one chooses: an expert that
    /// a rounding changes is no error of a device.
    fn experts(
        &self,
        layer: &Layer<Tensor<'_>>,
        mixture: &Mixture,
        hidden: &[Vec<f64>],
        normed: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let Layer { projections, norms, router, .. } = layer;
        let Projections { expert_gate_proj, expert_up_proj, expert_down_proj, .. } = projections;
        let [Some(gate_proj), Some(up_proj), Some(down_proj), Some(proj)] =
            [expert_gate_proj, expert_up_proj, expert_down_proj, &router.proj]
        else {
            unreachable!("a layer with a router has experts")
        };
        let input = match &router.scale {
            None => normed.to_vec(),
            Some(scale) => {
                let weight: Vec<f64> = self.checkpoint.read_f32(scale)?.into_iter().map(f64::from).collect();
                let mut input = hidden.to_vec();
                input.iter_mut().for_each(|row| normalize(row, &weight, self.config.norm_eps.into()));
                input
            }
        };
        let factor = f64::from(mixture.router_factor);
        let mut logits = self.product(proj, &input)?;
        logits.iter_mut().flatten().for_each(|logit| *logit *= factor);
        let scales =
            router.per_expert_scale.as_ref().map(|scales| self.checkpoint.read_f32(scales)).transpose()?;
        let normed = match &norms.pre_feedforward_layernorm_2 {
            None => normed.to_vec(),
            Some(norm) => self.normed(hidden, norm)?,
        };
        let Experts { count, per_token, renormalizes } = mixture.experts;
        let (width, out) = (mixture.intermediate_size, self.config.hidden_size);
        let chosen = |row: usize| -> Vec<(usize, f64)> {
            let exact = &logits[row % self.tokens];
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|a, b| exact[*b].total_cmp(&exact[*a]).then(a.cmp(b)));
            let most = logits[row].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let share = |expert: usize| (logits[row][expert] - most).exp();
            let chosen = &order[..per_token];
            let all: f64 = if renormalizes {
                chosen.iter().map(|expert| share(*expert)).sum()
            } else {
                (0..count).map(share).sum()
            };
            let weight = |expert: usize| {
                share(expert) / all * scales.as_ref().map_or(1.0, |scales| scales[expert].into())
            };
            chosen.iter().map(|expert| (*expert, weight(*expert))).collect()
        };
        let routed: Vec<_> = (0..hidden.len()).map(chosen).collect();
        let mut sums = vec![vec![0.0; out]; hidden.len()];
        for expert in 0..count {
            let users: Vec<usize> = (0..self.tokens)
                .filter(|row| routed[*row].iter().any(|(chosen, _)| *chosen == expert))
                .collect();
            if users.is_empty() {
                continue;
            }
            // The rows of the exact pass, and the same ones of the other pass.
            let rows: Vec<usize> =
                users.iter().copied().chain(users.iter().map(|row| row + self.tokens)).collect();
            let x: Vec<Vec<f64>> = rows.iter().map(|row| normed[*row].clone()).collect();
            let own = Twin { tokens: users.len(), ..*self };
            let of_expert = |rows: usize| (expert * rows..(expert + 1) * rows).collect::<Vec<_>>();
            let gate = own.products(gate_proj, &x, &of_expert(width))?;
            let up = own.products(up_proj, &x, &of_expert(width))?;
            let result = own.products(down_proj, &self.gated(gate, &up), &of_expert(out))?;
            for (row, result) in rows.into_iter().zip(result) {
                let (_, weight) = routed[row].iter().find(|(chosen, _)| *chosen == expert).expect("a user");
                sums[row].iter_mut().zip(result).for_each(|(sum, x)| *sum += weight * x);
            }
        }
        Ok(sums)
    }

    /// The keys and values of a layer.
    fn keys_and_values(
        &self,
        layer: &Layer<Tensor<'_>>,
        spec: &LayerSpec,
        normed: &[Vec<f64>],
    ) -> Result<[Vec<Vec<f64>>; 2], CheckpointError> {
        let c = self.config;
        let dim = spec.heads.head_dim;
        let Projections { k_proj, v_proj, .. } = &layer.projections;
        let mut keys = self.product(k_proj.as_ref().expect("a layer with keys of its own"), normed)?;
        let mut values = match v_proj {
            Some(v_proj) => self.product(v_proj, normed)?,
            None => keys.clone(),
        };
        let biases = layer.biases.as_ref();
        self.add_bias(&mut keys, biases.k_proj)?;
        self.add_bias(&mut values, biases.v_proj)?;
        self.norm_and_rotate(&mut keys, layer.norms.k_norm.as_ref(), spec)?;
        if c.has_value_norm {
            let ones = vec![1.0; dim];
            for head in values.iter_mut().flat_map(|row| row.chunks_exact_mut(dim)) {
                normalize(head, &ones, c.norm_eps.into());
            }
        }
        for rows in [&mut keys, &mut values] {
            rows[self.tokens..].iter_mut().flat_map(|row| row.chunks_exact_mut(dim)).for_each(round_head);
        }
        Ok([keys, values])
    }

    fn add_bias(&self, rows: &mut [Vec<f64>], bias: Option<&Tensor<'_>>) -> Result<(), CheckpointError> {
        let Some(bias) = bias else { return Ok(()) };
        let bias = self.checkpoint.read_f32(bias)?;
        for row in rows {
            row.iter_mut().zip(&bias).for_each(|(x, bias)| *x += f64::from(*bias));
        }
        Ok(())
    }

    /// The norm of each head, if there is one, and its RoPE.
    fn norm_and_rotate(
        &self,
        rows: &mut [Vec<f64>],
        norm: Option<&Tensor<'_>>,
        spec: &LayerSpec,
    ) -> Result<(), CheckpointError> {
        let dim = spec.heads.head_dim;
        let rope = &self.config.ropes[spec.rope];
        let (frequencies, factor) = (rope.frequencies(dim), rope.attention_factor());
        let weight = norm.map(|norm| self.norm_weight(norm)).transpose()?;
        for (row, of_token) in rows.iter_mut().enumerate() {
            for head in of_token.chunks_exact_mut(dim) {
                if let Some(weight) = &weight {
                    normalize(head, weight, self.config.norm_eps.into());
                }
                rotate(head, row % self.tokens, &frequencies, factor);
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        layer: &Layer<Tensor<'_>>,
        spec: &LayerSpec,
        normed: &[Vec<f64>],
        [keys, values]: [&[Vec<f64>]; 2],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let dim = spec.heads.head_dim;
        let window = spec.window.unwrap_or(usize::MAX);
        let mut queries = self.product(&layer.projections.q_proj, normed)?;
        self.add_bias(&mut queries, layer.biases.q_proj.as_ref())?;
        self.norm_and_rotate(&mut queries, layer.norms.q_norm.as_ref(), spec)?;
        let scale = self.config.score_scale;
        let group = spec.heads.group();
        let attend = |row: usize| {
            let (first, position) = (row / self.tokens * self.tokens, row % self.tokens);
            let seen = first + (position + 1).saturating_sub(window)..row + 1;
            let mut attended = vec![0.0; spec.heads.q_width()];
            for (head, out) in attended.chunks_exact_mut(dim).enumerate() {
                let query = &queries[row][head * dim..][..dim];
                let of_kv = head / group * dim..(head / group + 1) * dim;
                let dot = |key: &[f64]| key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>() * scale;
                let scores: Vec<f64> = seen.clone().map(|at| dot(&keys[at][of_kv.clone()])).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = shares.iter().sum();
                for (share, at) in shares.iter().zip(seen.clone()) {
                    let value = &values[at][of_kv.clone()];
                    out.iter_mut().zip(value).for_each(|(out, value)| *out += share / sum * value);
                }
            }
            attended
        };
        Ok((0..queries.len()).into_par_iter().map(attend).collect())
    }

    fn product(&self, matrix: &Tensor<'_>, x: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CheckpointError> {
        self.products(matrix, x, &(0..matrix.rows()).collect::<Vec<_>>())
    }

    /// Products of some rows of a matrix with each row of `x`.
    fn products(
        &self,
        matrix: &Tensor<'_>,
        x: &[Vec<f64>],
        rows: &[usize],
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let mut x: Vec<Vec<f32>> = x.iter().map(|row| row.iter().map(|x| *x as f32).collect()).collect();
        if Precision::Fast.quantizes(matrix.scheme()?) {
            x[self.tokens..].iter_mut().flat_map(|row| row.chunks_mut(BLOCK)).for_each(round_block);
        }
        let by_row = rows.par_iter().map_init(
            || vec![0f32; matrix.cols()],
            |weights, row| {
                matrix.rows_f32_into(*row..row + 1, weights)?;
                Ok(x.iter().map(|x| dot(weights, x)).collect())
            },
        );
        let by_row: Vec<Vec<f64>> = by_row.collect::<Result<_, CheckpointError>>()?;
        Ok((0..x.len()).map(|token| by_row.iter().map(|products| products[token]).collect()).collect())
    }

    /// The result of a sublayer after its norm, if it has one.
    fn post_normed(
        &self,
        result: Vec<Vec<f64>>,
        norm: Option<&Tensor<'_>>,
    ) -> Result<Vec<Vec<f64>>, CheckpointError> {
        match norm {
            Some(norm) => self.normed(&result, norm),
            None => Ok(result),
        }
    }

    fn normed(&self, x: &[Vec<f64>], norm: &Tensor<'_>) -> Result<Vec<Vec<f64>>, CheckpointError> {
        let weight = self.norm_weight(norm)?;
        let mut normed = x.to_vec();
        normed.iter_mut().for_each(|row| normalize(row, &weight, self.config.norm_eps.into()));
        Ok(normed)
    }

    /// The factors of a norm.
    fn norm_weight(&self, norm: &Tensor<'_>) -> Result<Vec<f64>, CheckpointError> {
        let adds_one = self.config.norm_weight == NormWeight::OnePlus && !self.checkpoint.norms_hold_one();
        let one = if adds_one { 1.0 } else { 0.0 };
        Ok(self.checkpoint.read_f32(norm)?.into_iter().map(|w| f64::from(w) + one).collect())
    }
}

fn add(hidden: &mut [Vec<f64>], result: &[Vec<f64>]) {
    for (hidden, result) in hidden.iter_mut().flatten().zip(result.iter().flatten()) {
        *hidden += result;
    }
}

fn normalize(row: &mut [f64], weight: &[f64], eps: f64) {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    let factor = (mean + eps).sqrt().recip();
    row.iter_mut().zip(weight).for_each(|(x, w)| *x *= factor * w);
}

/// Brings each row to the root mean square of the row of `target`.
fn match_sizes(rows: &mut [Vec<f64>], target: &[Vec<f64>]) {
    let mean_square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    for (row, target) in rows.iter_mut().zip(target) {
        let factor = mean_square(target).sqrt() / mean_square(row).max(1e-5).sqrt();
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Subtracts from a row its mean and so many standard deviations. What is negative then becomes 0.
fn cut_off(row: &mut [f64], deviations: f64) {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
    let cutoff = mean + variance.sqrt() * deviations;
    row.iter_mut().for_each(|x| *x = (*x - cutoff).max(0.0));
}

/// The sum of products, as far as both have elements.
fn dot_f64(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn rotate(head: &mut [f64], position: usize, frequencies: &[f64], factor: f64) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    for ((a, b), frequency) in first.iter_mut().zip(second).zip(frequencies) {
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        let (sin, cos) = (sin * factor, cos * factor);
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// A sum that the compiler can keep in vectors.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut sums = [0f64; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b));
    sums.into_iter().chain(rest).sum()
}

/// Rounds a block of activations to int8, in two digits where it has an outlier.
fn round_block(block: &mut [f32]) {
    let largest = |block: &[f32]| block.iter().fold(0f32, |most, x| most.max(x.abs()));
    let step = largest(block) / 127.0;
    if step == 0.0 {
        return;
    }
    let first: Vec<f32> = block.iter().map(|x| (x / step).round_ties_even()).collect();
    let has_second = first.iter().map(|q| q.abs()).sum::<f32>() < LEAST_MAGNITUDES;
    let rest: Vec<f32> = block.iter().zip(&first).map(|(x, q)| x - q * step).collect();
    let second_step = largest(&rest) / 127.0;
    for ((x, q), rest) in block.iter_mut().zip(first).zip(rest) {
        let second = match has_second && second_step > 0.0 {
            true => (rest / second_step).round_ties_even() * second_step,
            false => 0.0,
        };
        *x = q * step + second;
    }
}

/// Rounds a key or a value to int8.
fn round_head(head: &mut [f64]) {
    let step = head.iter().fold(0f64, |most, x| most.max(x.abs())) / 127.0;
    if step > 0.0 {
        head.iter_mut().for_each(|x| *x = (*x / step).round_ties_even() * step);
    }
}
