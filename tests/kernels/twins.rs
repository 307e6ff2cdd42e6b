//! Every kernel against its twin, a CPU implementation of the same function: odd shapes and tails, and seeded random
//! data. Outputs are NaN before each run, and so is all memory that a kernel must not read.

use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use half::f16;
use rand::Rng;
use rayon::prelude::*;
use unicorn::checkpoint::{Encoding, Tensor};
use unicorn::gpu::{
    Arena, Class, CommandBuffer, Device, DeviceKind, DevicePolicy, GpuError, MemoryKind, Uploader,
};
use unicorn::kernels::{
    Activations, Attention, AttentionBy, AttentionShape, AttentionTile, Bias, DrawScratch, Embedding,
    Experts, Heads, HiddenAct, History, Item, KvCache, LAST_SAMPLED, LOGPROB_WORDS, LayerKind, MAX_LOGPROBS,
    Matrix, NO_TOKEN, Operand, Peak, RmsNorm, Room, SampleRequest, Shares, StepArrays,
};
use unicorn::lab::kernel_cases::{Choice, KernelWork};
use unicorn::model::arch;
use unicorn::model::rig::Rig;
use unicorn::model::spec::{AttentionHeads, LayerSpec, Mixture, ModelSpec};
use unicorn::npu::kernels::{GatheredKeys, OffloadKernels};
use unicorn::quantize::{grouping, quantize_row};
use unicorn::tensor::{DType, KvDtype, Precision, Scheme};

use crate::support::kernel_bench::{
    Adjusted, BODIES, Bench, CACHED, Cached, Drawing, HEADS, Paged, SCHEMES, STORED, adjusted, close,
    device_with, inputs_for, shape, with_each_body,
};
use crate::support::reference::dequantize_row;
use crate::support::{device, policy, reference, skip, wants_all};

/// The weights of `values` after they are stored in a scheme.
fn as_stored(values: &[f32], cols: usize, scheme: Scheme) -> Vec<f32> {
    let mut out = Vec::new();
    for row in values.chunks_exact(cols) {
        match (scheme, grouping(scheme, cols)) {
            (Scheme::F16, _) => out.extend(row.iter().map(|v| f16::from_f32(*v).to_f32())),
            (Scheme::Bf16, _) => out.extend(row.iter().map(|v| half::bf16::from_f32(*v).to_f32())),
            (_, None) => out.extend(row),
            (_, Some((group, qmax))) => {
                let mut q = vec![0; cols];
                let mut scales = vec![f16::ZERO; cols.div_ceil(group)];
                quantize_row(row, group, qmax, &mut q, &mut scales).unwrap();
                let mut values = vec![0.0; cols];
                dequantize_row(&q, &scales, group, &mut values);
                out.extend(values);
            }
        }
    }
    out
}

/// The product of the rows `x` with a matrix of `rows` rows.
fn product(b: &mut Bench, matrix: &Matrix, x: &[f32], [tokens, rows, cols]: [usize; 3]) -> Vec<f32> {
    let (input, output) = (b.activations(x, cols), b.empty(tokens + 1, rows));
    b.run(|k, r| k.matmul(r, &[(matrix, &output)], &Operand::floats(&input), tokens));
    let mut all = b.rows(&output, tokens + 1);
    let beyond = all.split_off(tokens * rows);
    assert!(beyond.iter().all(|v| v.is_nan()), "{tokens} x [{rows}, {cols}]: wrote beyond its rows");
    all
}

#[test]
fn matmul_matches_its_twin() {
    with_each_body(1, |b| {
        // The shapes are (tokens, rows, cols): one token, tails of tiles and of blocks, more than one tile of columns.
        let shapes = [
            (1, 1, 1),
            (1, 32, 32),
            (1, 33, 37),
            (2, 31, 100),
            (4, 64, 128),
            (5, 70, 131),
            (9, 96, 260),
            (19, 45, 4),
        ];
        for scheme in SCHEMES {
            for (tokens, rows, cols) in shapes {
                let what = format!("{scheme:?} {tokens} x [{rows}, {cols}]");
                let w = b.random(rows * cols, 2.0);
                let x = b.random(tokens * cols, 3.0);
                // The matrix is also split into shards of one tile, and the rows of y must be the same.
                for shard in [u64::MAX, 1] {
                    let matrix = b.matrix(&w, rows, cols, scheme, shard);
                    let got = product(b, &matrix, &x, [tokens, rows, cols]);
                    let stored = as_stored(&w, cols, scheme);
                    let expected = reference::matmul(&x, &stored, tokens, rows, cols);
                    let magnitude = reference::matmul_magnitude(&x, &stored, tokens, rows, cols);
                    close(&got, &expected, &magnitude, 2e-6, &what);
                }
            }
        }
    });
}

#[test]
fn one_tokens_product_has_the_same_bits_in_any_batch_by_a_gpu_and_by_a_cpu() {
    let mut b = Bench::new(2);
    let (rows, cols) = (50, 203);
    let w = b.random(rows * cols, 1.0);
    let x = b.random(17 * cols, 1.0);
    for scheme in SCHEMES {
        let matrix = b.matrix(&w, rows, cols, scheme, u64::MAX);
        let [by_gpu, by_cpu] = BODIES.map(|bodies| {
            b.make_bodies(bodies);
            let mut product = |x: &[f32]| product(&mut b, &matrix, x, [x.len() / cols, rows, cols]);
            let all = product(&x);
            for (i, row) in x.chunks_exact(cols).enumerate() {
                assert_eq!(product(row), all[i * rows..(i + 1) * rows], "{scheme:?} token {i}");
            }
            assert_eq!(product(&x[..3 * cols]), all[..3 * rows], "{scheme:?}");
            all
        });
        assert_eq!(by_gpu, by_cpu, "{scheme:?}");
    }
}

#[test]
fn int4_scales_below_f16s_normal_range_are_exact() {
    let mut b = Bench::new(3);
    let cols = 64;
    // Rows with these scales: zero, the smallest subnormal, a subnormal, the smallest normal number.
    let tops = [0.0, 1e-9, 7.0 * 5.96e-8, 7.0 * 3.1e-6, 7.0 * 6.2e-5];
    let w: Vec<f32> =
        tops.iter().flat_map(|t| (0..cols).map(move |i| t * (i as f32 / 63.0 - 0.5) * 2.0)).collect();
    for scheme in [Scheme::Int8Row, Scheme::int4(32)] {
        let matrix = b.matrix(&w, tops.len(), cols, scheme, u64::MAX);
        let x: Vec<f32> = vec![1.0, 2.0, 4.0, 8.0].into_iter().cycle().take(cols).collect();
        let got = product(&mut b, &matrix, &x, [1, tops.len(), cols]);
        let stored = as_stored(&w, cols, scheme);
        for (i, e) in reference::matmul(&x, &stored, 1, tops.len(), cols).iter().enumerate() {
            let got = f64::from(got[i]);
            assert!((got - e).abs() <= e.abs() * 1e-6, "{scheme:?} row {i}: {got} instead of {e}");
        }
    }
}

#[test]
fn every_stored_scheme_is_read_as_specified() {
    with_each_body(16, |b| {
        let shapes = [(5, 45, 516), (1, 1, 1), (1, 33, 300), (2, 70, 256), (9, 64, 37)];
        for scheme in STORED {
            for &(tokens, rows, cols) in inputs_for(scheme, &shapes, 1) {
                let what = format!("{scheme} {tokens} x [{rows}, {cols}]");
                let stored = b.stored(rows, cols, scheme);
                let x = b.random(tokens * cols, 3.0);
                for shard in [u64::MAX, 1] {
                    let matrix = b.matrix_of(&stored.tensor(), scheme, shard);
                    let got = product(b, &matrix, &x, [tokens, rows, cols]);
                    let expected = reference::matmul(&x, &stored.values, tokens, rows, cols);
                    // The shift is added separately, so its rounding error remains even where the sum cancels.
                    let most = stored.values.iter().fold(0f32, |most, w| most.max(w.abs()));
                    let largest: Vec<f32> = vec![most; rows * cols];
                    let magnitude = reference::matmul_magnitude(&x, &largest, tokens, rows, cols);
                    close(&got, &expected, &magnitude, 4e-6, &what);
                }
            }
        }
    });
}

#[test]
fn direct_reads_and_staged_reads_give_the_same_bytes() {
    let mut b = Bench::new(18);
    // The data fills more than two staging buffers, plus a remainder.
    let bytes = (40 << 20) + 12;
    let data: Vec<u8> = (0..bytes).map(|_| b.rng.random()).collect();
    for staged in [false, true] {
        let buffer = b.poisoned(bytes);
        let mut uploader = Uploader::new(&b.device).unwrap();
        if staged {
            uploader = uploader.staged();
        }
        // The second half of the buffer is read by a separate request, which is queued first.
        let (head, tail) = (buffer.slice(0, 24 << 20), buffer.slice(24 << 20, bytes as u64 - (24 << 20)));
        let read = |start: usize| {
            let data = &data;
            move |offset: u64, piece: &mut [u8]| {
                piece.copy_from_slice(&data[start + offset as usize..][..piece.len()]);
                Ok::<_, GpuError>(())
            }
        };
        uploader.queue(&tail, read(24 << 20));
        uploader.queue(&head, read(0));
        uploader.finish().unwrap();
        assert!(b.download::<u8>(&buffer, bytes) == data, "staged: {staged}");

        let fail = |offset: u64, _: &mut [u8]| match offset {
            0 => Ok(()),
            _ => Err(GpuError::Unusable("read error".into())),
        };
        let mut uploader = Uploader::new(&b.device).unwrap();
        uploader.queue(&buffer, fail);
        let error = uploader.finish().unwrap_err();
        assert!(error.to_string().contains("read error"), "{error}");
    }
}

#[test]
#[should_panic(expected = "two reads fill the same bytes")]
fn two_reads_into_the_same_bytes_are_refused() {
    let mut b = Bench::new(19);
    let buffer = b.poisoned(1 << 20);
    let read = |_: u64, _: &mut [u8]| Ok::<_, GpuError>(());
    let both = [buffer.slice(0, 1 << 19), buffer.slice((1 << 19) - 4, 1 << 19)];
    let mut uploader = Uploader::new(&b.device).unwrap();
    both.iter().for_each(|half| uploader.queue(half, read));
    let _ = uploader.read_queued();
}

#[test]
fn embed_yields_every_weight_of_every_stored_scheme() {
    for (seed, scheme) in STORED.into_iter().enumerate() {
        let mut b = Bench::new(30 + seed as u64);
        b.make_scheme(scheme, Precision::F32);
        for (rows, cols) in [(7, 5), (70, 600)] {
            let stored = b.stored(rows, cols, scheme);
            let matrix = b.matrix_of(&stored.tensor(), scheme, 1);
            let embedding = b.embedding(matrix, 1.25);
            let ids: Vec<u32> = (0..rows as u32).collect();
            let (id_buffer, output) = (b.upload(&ids), b.empty(rows, cols));
            b.run(|k, r| k.embed(r, &embedding, &id_buffer, &id_buffer, &output, rows));
            for (i, (got, w)) in b.rows(&output, rows).iter().zip(&stored.values).enumerate() {
                assert_eq!(*got, w * 1.25, "{scheme} row {} column {}", i / cols, i % cols);
            }
        }
    }
}

#[test]
fn embed_yields_every_stored_weight() {
    for (seed, scheme) in SCHEMES.into_iter().enumerate() {
        let mut b = Bench::new(10 + seed as u64);
        b.make_scheme(scheme, Precision::F32);
        for (rows, cols, shard) in [(7, 5, u64::MAX), (100, 130, u64::MAX), (100, 130, 1)] {
            let w = b.random(rows * cols, 1.5);
            let stored = as_stored(&w, cols, scheme);
            let matrix = b.matrix(&w, rows, cols, scheme, shard);
            let embedding = b.embedding(matrix, 1.25);
            // The ids of all rows, then references to the last sampled ids of slots 2, 0 and 1. The id of slot 1 has no
            // row.
            let mut ids: Vec<u32> = (0..rows as u32).collect();
            ids.extend([LAST_SAMPLED | 2, LAST_SAMPLED, LAST_SAMPLED | 1]);
            let sampled = b.upload(&[rows as u32 - 1, rows as u32, 3]);
            let id_buffer = b.upload(&ids);
            let output = b.empty(ids.len(), cols);
            b.run(|k, r| k.embed(r, &embedding, &id_buffer, &sampled, &output, ids.len()));
            let got = b.rows(&output, ids.len());
            let wanted = (0..rows).chain([3, rows - 1, rows - 1]);
            for (i, row) in wanted.enumerate() {
                for c in 0..cols {
                    let expected = stored[row * cols + c] * 1.25;
                    assert_eq!(got[i * cols + c], expected, "{scheme:?} row {row} column {c}");
                }
            }
        }
    }
}

#[test]
fn the_27b_embedding_works_at_full_size() {
    // The matrix has 2.8 GB of bf16: more than the range of a storage buffer (128 MiB on lavapipe) and more than one
    // allocation (2 GiB).
    let mut b = Bench::new(15);
    let (rows, cols) = (262_208, 5376);
    let value = |row: usize, col: usize| ((row * 31 + col * 7) % 251) as f32 / 64.0 - 2.0;
    let mut data = vec![0u8; rows * cols * 2];
    data.par_chunks_exact_mut(cols * 2).enumerate().for_each(|(row, bytes)| {
        for (col, bytes) in bytes.chunks_exact_mut(2).enumerate() {
            bytes.copy_from_slice(&half::bf16::from_f32(value(row, col)).to_le_bytes());
        }
    });
    let shape = [rows, cols];
    let encoding = Encoding::Plain { dtype: DType::BF16, data: &data };
    let tensor = Tensor { name: "embedding", file: "test", shape: &shape, encoding, interleaved: None };
    let mut uploader = Uploader::new(&b.device).unwrap();
    let limit = b.device.info().max_allocation_bytes.min(1 << 31);
    let mut packed = Vec::new();
    let (arena, class, progress) = (&mut b.arena, Class::Embedding, &mut |rows| packed.push(rows));
    let matrix = Matrix::upload(arena, &mut uploader, &tensor, Scheme::Bf16, class, limit, progress).unwrap();
    let embedding = Embedding::new(&mut b.arena, &mut uploader, matrix, 1.0).unwrap();
    uploader.finish().unwrap();
    let placed: u64 =
        b.arena.placements().iter().filter(|p| p.class == Class::Embedding).map(|p| p.bytes).sum();
    assert!(placed >= (rows * cols * 2) as u64, "{placed} bytes of weights");

    assert!(packed.is_sorted() && packed.last() == Some(&rows), "progress: {packed:?}");

    // The ids are neighbours in a tile, the ends of shards, and the last row.
    let shard_rows = (limit / (cols as u64 * 2)) as usize / 32 * 32;
    let ids = [0, 31, 32, 12_345, shard_rows - 1, shard_rows, rows - 1].map(|id| id as u32);
    let id_buffer = b.upload(&ids);
    let output = b.empty(ids.len(), cols);
    b.run(|k, r| k.embed(r, &embedding, &id_buffer, &id_buffer, &output, ids.len()));
    for (row, id) in b.rows(&output, ids.len()).chunks_exact(cols).zip(ids) {
        let wrong = (0..cols).find(|&c| row[c] != value(id as usize, c));
        assert_eq!(wrong, None, "row {id}");
    }

    // The logits of every row are compared.
    let x: Vec<f32> = b.random(cols, 1.0);
    let got = product(&mut b, embedding.matrix(), &x, [1, rows, cols]);
    got.par_iter().enumerate().for_each(|(row, got)| {
        let expected: f64 = (0..cols).map(|c| f64::from(value(row, c)) * f64::from(x[c])).sum();
        assert!((f64::from(*got) - expected).abs() < 0.01, "row {row}: {got} instead of {expected}");
    });
}

#[test]
fn rms_norm_and_its_variants_match_their_twin() {
    with_each_body(20, |b| {
        for (rows, dim) in [(1, 1), (3, 31), (2, 256), (5, 257), (2, 1153)] {
            for scale in [1.0, 1e-4, 300.0] {
                let what = format!("{rows} x {dim}, scale {scale}");
                let x = b.random(rows * dim, scale);
                let weight = b.random(dim, 1.0);
                let base = b.random(rows * dim, 1.0);
                let eps = 1e-6;
                let (input, norm) = (b.activations(&x, dim), RmsNorm { weight: b.upload(&weight), eps });
                let expected: Vec<f64> = x
                    .chunks_exact(dim)
                    .flat_map(|row| {
                        let row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                        reference::rms_norm(&row, &weight, f64::from(eps))
                    })
                    .collect();
                let magnitude: Vec<f64> = expected.iter().map(|v| v.abs() + 0.1).collect();

                let output = b.empty(rows, dim);
                b.run(|k, r| k.rms_norm(r, &input, &norm, &Operand::floats(&output), rows));
                close(&b.rows(&output, rows), &expected, &magnitude, 3e-6, &what);

                let output = b.activations(&base, dim);
                b.run(|k, r| k.rms_norm_add(r, &input, (Some(&norm), 1.0), &output, rows));
                let sums: Vec<f64> = expected.iter().zip(&base).map(|(e, b)| e + f64::from(*b)).collect();
                close(&b.rows(&output, rows), &sums, &magnitude, 4e-6, &format!("{what}, add"));

                let index: Vec<u32> = (0..rows as u32).rev().chain([0]).collect();
                let index_buffer = b.upload(&index);
                let output = b.empty(index.len(), dim);
                b.run(|k, r| {
                    let output = Operand::floats(&output);
                    k.rms_norm_gather(r, &input, &index_buffer, &norm, &output, index.len());
                });
                let gathered: Vec<f64> =
                    index.iter().flat_map(|&i| expected[i as usize * dim..][..dim].to_vec()).collect();
                let magnitude: Vec<f64> = gathered.iter().map(|v| v.abs() + 0.1).collect();
                close(&b.rows(&output, index.len()), &gathered, &magnitude, 3e-6, &format!("{what}, gather"));
            }
        }
    });
}

#[test]
fn attention_matches_its_twin_over_pages_and_windows() {
    let mut b = Bench::new(30);
    let shapes = [
        shape(2, 1, 32, 16, None),
        shape(7, 1, 128, 16, None),
        shape(6, 1, 16, 16, Some(12)),
        shape(4, 2, 64, 16, Some(64)),
        shape(6, 2, 128, 16, Some(7)),
        shape(3, 1, 100, 5, Some(1)),
        shape(4, 4, 256, 16, None),
        shape(4, 1, 256, 32, Some(70)),
        shape(2, 2, 36, 16, Some(1000)),
        shape(16, 1, 64, 16, Some(40)),
        // The largest shape for a device with 32 KiB of shared memory.
        shape(16, 1, 256, 16, Some(40)),
        shape(16, 1, 512, 16, None),
        shape(4, 2, 264, 16, Some(9)),
    ];
    // The types of keys and values take turns. With `UNICORN_TEST_KERNELS=all`, every shape runs with two of them.
    let runs = if wants_all("UNICORN_TEST_KERNELS") { 2 } else { 1 };
    let cases = shapes.iter().flat_map(|s| (0..runs).map(|_| *s)).zip(KvDtype::ALL.into_iter().cycle());
    for ((shape, kv), bodies) in cases.zip(BODIES.into_iter().cycle()) {
        b.make_bodies(bodies);
        let sequences =
            &[(1, 1), (67, 3), (16, 16), (110, 1), (64, 2)][..if shape.block_size == 5 { 3 } else { 5 }];
        let attended = Attended::new(&mut b, shape, kv, 0.5, sequences);
        attended.check_twin(&mut b, attended.paged.room());
    }
}

/// Attention over a cache, with rotations that must not be read.
fn attention_over(b: &mut Bench, shape: AttentionShape, cached: &[Vec<u8>; 2]) -> Attention {
    let cache = KvCache { keys: b.upload(&cached[0]), values: b.upload(&cached[1]) };
    let nothing = b.poisoned(4 * shape.head_dim);
    Attention {
        shape,
        qk_norms: None,
        norm_eps: f32::NAN,
        biases: None,
        rope: nothing,
        q_scale: f32::NAN,
        shares_cache: false,
        cache,
    }
}

/// Attention of one layer over random keys and values.
struct Attended {
    paged: Paged,
    kv: KvDtype,
    /// The bytes of the keys and of the values.
    cached: [Vec<u8>; 2],
    attention: Attention,
    arrays: StepArrays,
    q: Activations,
}

impl Attended {
    /// `spread` is the range of the queries. `len` has the length of each sequence and its tokens in the step.
    fn new(
        b: &mut Bench,
        shape: AttentionShape,
        kv: KvDtype,
        spread: f32,
        sequences: &[(usize, usize)],
    ) -> Attended {
        b.make_heads(&shape, kv);
        let paged = Paged::new(b, shape, sequences);
        let mut cached = [paged.empty_cache(kv), paged.empty_cache(kv)];
        for (s, &(len, _)) in paged.sequences.iter().enumerate() {
            for position in 0..len {
                for head in 0..shape.num_kv_heads {
                    for (cached, part) in cached.iter_mut().zip(CACHED) {
                        let random = b.random(shape.head_dim, 1.0);
                        paged.file_away(cached, kv, part, (s, position, head), &random);
                    }
                }
            }
        }
        let width = shape.num_heads * shape.head_dim;
        let tokens = paged.tokens().len();
        let rows = b.random(tokens * width, spread);
        let (arrays, q) = (paged.arrays(b), b.activations(&rows, width));
        let attention = attention_over(b, shape, &cached);
        Attended { paged, kv, cached, attention, arrays, q }
    }

    /// The same with images at these positions of the sequences.
    fn with_images(mut self, images: &[(usize, Range<usize>)]) -> Attended {
        self.paged.images = images.to_vec();
        self
    }

    fn tokens(&self) -> usize {
        self.paged.tokens().len()
    }

    /// The bits of the attention output, with this division of the work.
    fn run(&self, b: &mut Bench, shares: &Shares, room: Room) -> Vec<u32> {
        let Attended { attention, arrays, q, .. } = self;
        let shape = &attention.shape;
        let tokens = self.tokens();
        let (partials, y) = (b.partials(shape, room), b.empty(tokens, q.width));
        let step = StepArrays { shares: b.shares(shares, shape.num_kv_heads), ..arrays.clone() };
        b.run(|k, r| k.attention(r, attention, (q, &partials), &step, &Operand::floats(&y), tokens));
        b.rows(&y, tokens).into_iter().map(f32::to_bits).collect()
    }

    /// Compares the output with the CPU implementation, which reads the same keys and values. Returns the sum of squared
    /// differences, and of squared expected values.
    fn check_twin(&self, b: &mut Bench, room: Room) -> [f64; 2] {
        let mut squares = [0.0; 2];
        let Attended { paged, kv, cached, attention, .. } = self;
        let (shape, d, tokens) = (&attention.shape, attention.shape.head_dim, self.tokens());
        let shares = Shares::new(shape, &paged.runs(), tokens, tokens, room);
        let got: Vec<f32> = self.run(b, &shares, room).into_iter().map(f32::from_bits).collect();
        let q = b.rows(&self.q, tokens);
        for (t, &(s, position)) in paged.tokens().iter().enumerate() {
            let first = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
            for head in 0..shape.num_heads {
                let kv_head = head / (shape.num_heads / shape.num_kv_heads);
                let [k, v] = [0, 1].map(|i| {
                    let row = |p| paged.read(&cached[i], *kv, CACHED[i], (s, p, kv_head));
                    (first..=paged.last_seen(s, position)).map(row).collect::<Vec<_>>()
                });
                let [k, v] = [&k, &v].map(|rows| rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
                let at = (t * shape.num_heads + head) * d;
                let expected = reference::attention(&q[at..at + d], &k, &v);
                let what = format!("{shape:?} {kv} sequence {s} position {position} head {head}");
                let length = q[at..at + d].iter().map(|q| f64::from(q * q)).sum::<f64>().sqrt();
                let most = match b.attention {
                    AttentionBy::Lanes => 5e-6,
                    // Values of up to 1 and weights are rounded to f16, and so are queries: by 2^-11 of their size, which
                    // changes scores by some of that if the keys are up to 1.
                    AttentionBy::Subgroups(_) => 5e-4 * (1.0 + length),
                };
                close(&got[at..at + d], &expected, &vec![1.0; d], most, &what);
                let errors = got[at..at + d].iter().zip(&expected).map(|(got, want)| f64::from(*got) - want);
                squares[0] += errors.map(|error| error * error).sum::<f64>();
                squares[1] += expected.iter().map(|want| want * want).sum::<f64>();
            }
        }
        squares
    }

    /// Divides the work in every way. All results must have the same bits, and no NaN of the padding.
    fn check(&self, b: &mut Bench, what: &str) {
        let tokens = self.tokens();
        let shape = &self.attention.shape;
        let roomy = Room { single: 8 * tokens + 400, tiles: 8 * tokens + 400 };
        let ways = [
            ("split", roomy, tokens),
            ("walked", Room { single: tokens, tiles: tokens }, tokens),
            ("only tiles", Room { single: 0, ..roomy }, tokens),
            ("only tiles, walked", Room { single: 0, tiles: tokens }, tokens),
            ("token by token", roomy, 1),
            ("token by token in tiles", Room { single: 0, ..roomy }, 1),
            ("three by three", roomy, 3),
        ];
        let mut expected: Option<Vec<u32>> = None;
        for (way, room, rows_per_part) in ways {
            let shares = Shares::new(shape, &self.paged.runs(), tokens, rows_per_part, room);
            let got = self.run(b, &shares, room);
            assert!(got.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{what}, {way}: not finite");
            let expected = expected.get_or_insert_with(|| got.clone());
            let off = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
            assert_eq!(off, 0, "{what}, {way}: bits of {off} of {} numbers differ", got.len());
        }
        // One workgroup computes the first splits of each token. Each other split has its own workgroup.
        let shares =
            Shares::new(shape, &self.paged.runs(), tokens, 1, Room { single: tokens, tiles: tokens });
        for walked in [1, 2, 5] {
            let mut cut = shares.clone();
            cut.single.clear();
            for item in &shares.single {
                let (slot, rest) = (cut.single.len() as u32, item.splits.saturating_sub(walked));
                cut.single.push(Item { splits: item.splits - rest, slot, ..*item });
                cut.single.extend((0..rest).map(|n| Item {
                    first_split: item.first_split + walked + n,
                    splits: 1,
                    slot: slot + 1 + n,
                    ..*item
                }));
                cut.merges[item.token as usize] = [slot, 1 + rest];
            }
            let room = Room { single: cut.single.len(), tiles: 1 };
            let got = self.run(b, &cut, room);
            assert!(Some(got) == expected, "{what}, {walked} splits walked");
        }
    }
}

/// A CPU takes long to emulate tiles, so there are few cases.
#[test]
fn attention_in_emulated_tiles_matches_its_twin_and_keeps_its_bits() {
    let emulated = |tile| AttentionTile::emulated(tile).expect("the kernel can use it");
    let tiles = [[16, 16, 16], [16, 16, 16], [16, 16, 16], [16, 8, 32], [8, 8, 8]].map(emulated);
    check_attention_in(&mut Bench::new(34), &tiles);
}

/// Uses the cooperative matrices of the device. For larger heads, software Vulkan compiles longer than a step may take.
#[test]
fn attention_by_tiles_that_subgroups_multiply_matches_its_twin() {
    let Some((device, tile)) = device_with(AttentionTile::of) else { return skip("cooperative-matrices") };
    check_attention_in(&mut Bench::on(&device, 34), &[tile; 2]);
}

/// Checks a case for each of the tiles.
fn check_attention_in(b: &mut Bench, tiles: &[AttentionTile]) {
    let cases = [
        (shape(4, 2, 128, 16, Some(70)), KvDtype::F16, &[(130, 20), (65, 1)][..]),
        (shape(5, 1, 48, 5, None), KvDtype::Int8, &[(101, 9), (90, 1)]),
        (shape(8, 1, 512, 16, None), KvDtype::F16, &[(70, 3), (65, 1)]),
        (shape(16, 1, 80, 16, Some(40)), KvDtype::F16, &[(70, 5), (64, 1)]),
        (shape(4, 1, 256, 32, None), KvDtype::Int8, &[(140, 9), (70, 1)]),
    ];
    let mut squares = [0.0; 2];
    for (tile, (shape, kv, sequences)) in tiles.iter().zip(cases) {
        b.attention = AttentionBy::Subgroups(*tile);
        // Either the attention weights are of similar size, or a few are large.
        for spread in [0.5, 3.0] {
            let attended = Attended::new(b, shape, kv, spread, sequences);
            let [error, all] = attended.check_twin(b, attended.paged.room());
            println!("{}, {shape:?} {kv}, queries of {spread}: NMSE {:.1e}", b.attention, error / all);
            squares = [squares[0] + error, squares[1] + all];
        }
        // One weight is nearly 1 and the others vanish.
        let attended = Attended::new(b, shape, kv, 300.0, sequences);
        attended.check(b, &format!("{shape:?}, {kv}"));
    }
    println!("NMSE of all: {:.1e}", squares[0] / squares[1]);
    assert!(squares[0] < 1e-6 * squares[1], "{squares:?}");
}

#[test]
fn attention_has_the_same_bits_for_every_division_of_the_work() {
    let mut b = Bench::new(31);
    let shapes = [
        (shape(2, 1, 32, 16, None), &[(1, 1), (300, 1), (260, 70)][..]),
        (shape(4, 2, 128, 16, None), &[(330, 40), (65, 1), (64, 64), (193, 1)]),
        (shape(4, 2, 128, 16, Some(70)), &[(330, 40), (65, 1), (64, 64)]),
        (shape(4, 1, 256, 32, Some(100)), &[(290, 9), (200, 1), (70, 70)]),
        (shape(3, 1, 100, 5, Some(66)), &[(101, 30), (90, 1)]),
        (shape(5, 1, 36, 16, None), &[(201, 13), (129, 1)]),
        (shape(16, 1, 64, 16, None), &[(150, 5), (64, 1)]),
        (shape(1, 1, 4, 16, Some(1)), &[(140, 70), (64, 1)]),
        (shape(16, 1, 256, 16, Some(40)), &[(110, 3), (64, 1)]),
        (shape(16, 8, 64, 16, None), &[(300, 40), (129, 1)]),
        (shape(8, 1, 512, 16, None), &[(150, 5), (130, 1)]),
    ];
    // Every second shape, or all with `UNICORN_TEST_KERNELS=all`.
    let step = if wants_all("UNICORN_TEST_KERNELS") { 1 } else { 2 };
    for ((shape, sequences), kv) in shapes.into_iter().step_by(step).zip(KvDtype::ALL.into_iter().cycle()) {
        // Either all attention weights are of similar size, or one is nearly 1 and the others vanish.
        for spread in [0.5, 300.0] {
            let attended = Attended::new(&mut b, shape, kv, spread, sequences);
            attended.check(&mut b, &format!("{shape:?}, {kv}, queries of {spread}"));
        }
    }
}

/// Images in the middle, at the beginning and at the end; in neighbours; longer than a window, a tile and a split; and of
/// which the step has the end only.
#[test]
fn tokens_of_an_image_see_all_of_it_and_keep_their_bits() {
    let mut b = Bench::new(35);
    let cases = [
        (shape(4, 2, 32, 16, None), &[(210, 200), (65, 1), (30, 30)][..], &[(0, 40..170), (2, 0..30)][..]),
        (shape(4, 2, 64, 16, Some(24)), &[(120, 110), (90, 40)], &[(0, 20..90), (1, 60..75), (1, 75..90)]),
        (shape(2, 2, 72, 16, None), &[(144, 144)], &[(0, 0..144)]),
        (shape(16, 1, 36, 5, Some(7)), &[(40, 13), (33, 1)], &[(0, 20..39), (1, 30..33)]),
    ];
    for (shape, sequences, images) in cases {
        for kv in KvDtype::ALL {
            let attended = Attended::new(&mut b, shape, kv, 3.0, sequences).with_images(images);
            attended.check(&mut b, &format!("{shape:?}, {kv}, images"));
            attended.check_twin(&mut b, attended.paged.room());
        }
    }
    let tile = AttentionTile::emulated([16, 16, 16]).expect("the kernel can use it");
    b.attention = AttentionBy::Subgroups(tile);
    let tiled = shape(4, 2, 48, 16, Some(24));
    let attended = Attended::new(&mut b, tiled, KvDtype::F16, 1.0, &[(120, 110)]).with_images(&[(0, 20..90)]);
    attended.check(&mut b, "emulated tiles, images");
    attended.check_twin(&mut b, attended.paged.room());
}

/// After 16 blocks of 64 keys, splits are four times as long. After 128 blocks, they are sixteen times as long.
#[test]
fn attention_matches_its_twin_where_splits_become_longer() {
    let mut b = Bench::new(32);
    let long = AttentionShape { max_blocks: 150, ..shape(2, 1, 32, 64, None) };
    let sequences = [(1023, 1), (1026, 3), (8191, 1), (8194, 3), (9300, 2), (1281, 1)];
    for kv in KvDtype::ALL {
        let attended = Attended::new(&mut b, long, kv, 1.0, &sequences);
        attended.check(&mut b, &format!("{kv}"));
        attended.check_twin(&mut b, Room { single: 400, tiles: 400 });
    }
}

#[test]
fn padding_tokens_attend_to_nothing() {
    let mut b = Bench::new(33);
    let shape = shape(4, 2, 32, 16, None);
    let attended = Attended::new(&mut b, shape, KvDtype::F16, 1.0, &[(70, 2), (9, 3)]);
    let room = Room { single: 20, tiles: 20 };
    let runs = attended.paged.runs();
    let tokens = attended.tokens();
    let all = attended.run(&mut b, &Shares::new(&shape, &runs, tokens, tokens, room), room);
    let some = attended.run(&mut b, &Shares::new(&shape, &runs[..1], tokens, tokens, room), room);
    let known = 2 * 4 * 32;
    assert_eq!(some[..known], all[..known]);
    assert!(some[known..].iter().all(|bits| *bits == 0));
}

/// Values for which bf16 rounding is difficult: ties in both directions, the ends of the range, infinity and NaN.
const ROUNDED: [f32; 12] = [
    f32::from_bits(0x3f80_8000),
    f32::from_bits(0x3f81_8000),
    f32::from_bits(0x3f80_8001),
    f32::from_bits(0xbf80_7fff),
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    f32::NAN,
    1e-30,
];

fn bf16_bits(value: &f32) -> u16 {
    half::bf16::from_f32(*value).to_bits()
}

/// Heads, KV heads, head dimension, and the number of KV heads that the NPU computes.
const OFFLOADED: [(usize, usize, usize, usize); 5] =
    [(2, 1, 32, 1), (6, 3, 128, 2), (3, 1, 100, 1), (4, 4, 256, 4), (16, 2, 36, 1)];

#[test]
fn npu_queries_are_rounded_to_bf16_and_grouped_by_head() {
    let mut b = Bench::new(41);
    let kernels = OffloadKernels::new(&b.device, HEADS).unwrap();
    for (case, (heads, kv_heads, d, offloaded)) in OFFLOADED.into_iter().enumerate() {
        for (rows, stride) in [(1, 1), (1, 7), (33, 40), (32, 32), (50, 64)] {
            let shape = shape(heads, kv_heads, d, 16, None);
            let mut q = b.random(rows * heads * d, 3.0);
            for (i, value) in ROUNDED.into_iter().enumerate() {
                let at = (7 * i + 5 * case) % q.len();
                q[at] = value;
            }
            let input = b.activations(&q, heads * d);
            let count = heads / kv_heads * offloaded;
            // Memory after the last head must not change.
            let to = b.poisoned(2 * count * stride * d + 64);
            b.run(|_, r| kernels.queries(r, &shape, (&input, rows), offloaded, (&to, stride)));
            let got = b.download::<u16>(&to, count * stride * d + 32);
            let mut expected = vec![0u16; count * stride * d];
            for (head, row) in (0..count).flat_map(|head| (0..rows).map(move |row| (head, row))) {
                let from = q[(row * heads + head) * d..][..d].iter().map(bf16_bits);
                let to = (head * stride + row) * d;
                expected[to..to + d].iter_mut().zip(from).for_each(|(to, from)| *to = from);
            }
            expected.extend([0xdead, 0x7fc0].repeat(16));
            assert!(got == expected, "{shape:?}, {rows} rows of {stride}");
        }
    }
}

#[test]
fn npu_keys_are_gathered_from_the_blocks_of_a_sequence() {
    let mut b = Bench::new(42);
    for ((heads, kv_heads, d, offloaded), kv) in
        OFFLOADED.into_iter().flat_map(|heads| KvDtype::ALL.map(|kv| (heads, kv)))
    {
        for block_size in [1, 5, 16, 32] {
            let shape = AttentionShape { max_blocks: 80, ..shape(heads, kv_heads, d, block_size, None) };
            let group = heads / kv_heads;
            let kernels = OffloadKernels::new(&b.device, Heads { group, head_dim: d, kv }).unwrap();
            let mut paged = Paged::new(&mut b, shape, &[(21, 1), (70, 9)]);
            let mut cached = [paged.empty_cache(kv), paged.empty_cache(kv)];
            let mut kept = [vec![Vec::new(); 70 * kv_heads], vec![Vec::new(); 70 * kv_heads]];
            for (position, head) in (0..70).flat_map(|p| (0..kv_heads).map(move |head| (p, head))) {
                for ((cached, part), kept) in cached.iter_mut().zip(CACHED).zip(&mut kept) {
                    let mut random = b.random(d, 2.0);
                    random[position % d] = ROUNDED[position % 4];
                    let place = (1, position, head);
                    kept[position * kv_heads + head] = paged.file_away(cached, kv, part, place, &random);
                }
            }
            let attention = attention_over(&mut b, shape, &cached);
            for (first, first_seen, count, stride) in
                [(0, 0, 70, 70), (0, 0, 1, 3), (13, 13, 50, 64), (32, 39, 38, 40), (3, 66, 67, 67)]
            {
                // Blocks that no row sees have been freed. Here they hold another sequence, full of NaNs.
                let table = paged.tables[1].clone();
                let free = (0..paged.num_blocks as u32).find(|block| !table.contains(block)).unwrap();
                paged.tables[1][..first_seen / block_size].fill(free);
                let blocks = paged.arrays(&mut b).block_tables;
                paged.tables[1] = table;
                let row = 4 * shape.max_blocks as u64;
                let span = GatheredKeys { first, count, first_seen, stride };
                let to = [(); 2].map(|()| b.poisoned(2 * offloaded * stride * d + 64));
                b.run(|_, r| {
                    let blocks = blocks.slice(row, row);
                    kernels.cache(r, &attention, (&blocks, &span), offloaded, [&to[0], &to[1]]);
                });
                for (to, kept) in to.iter().zip(&kept) {
                    let mut expected = vec![0u16; offloaded * stride * d];
                    for position in first_seen..first + count {
                        for head in 0..offloaded {
                            let to = (head * stride + position - first) * d;
                            let from = kept[position * kv_heads + head].iter().map(bf16_bits);
                            expected[to..to + d].iter_mut().zip(from).for_each(|(to, from)| *to = from);
                        }
                    }
                    expected.extend([0xdead, 0x7fc0].repeat(16));
                    let got = b.download::<u16>(to, expected.len());
                    assert!(got == expected, "{shape:?}, {kv}, {span:?}");
                }
            }
        }
    }
}

/// The GPU computes some KV heads of the middle tokens, and all heads of the other tokens. The remaining heads come
/// from the NPU.
#[test]
fn npu_output_replaces_the_heads_that_the_npu_computed() {
    let mut b = Bench::new(43);
    // The middle has tiles that are split, tiles that are not, and a last tile of one token.
    let cases = [
        (shape(4, 2, 32, 16, None), &[(300, 1), (293, 33), (260, 20)][..], 1),
        (shape(4, 2, 64, 16, Some(70)), &[(130, 1), (101, 17), (90, 1)], 2),
        (shape(16, 2, 36, 16, None), &[(7, 7), (210, 9), (64, 1)], 1),
        (shape(3, 1, 100, 5, None), &[(5, 2), (101, 1), (90, 1)], 1),
        (shape(6, 3, 128, 16, Some(9)), &[(40, 3), (80, 50), (9, 9)], 2),
    ];
    for ((shape, sequences, offloaded), kv) in cases.into_iter().zip(KvDtype::ALL.into_iter().cycle()) {
        let attended = Attended::new(&mut b, shape, kv, 1.0, sequences);
        let (tokens, runs) = (attended.tokens(), attended.paged.runs());
        let room = Room { single: tokens + 60, tiles: tokens + 400 };
        let shares = Shares::new(&shape, &runs, tokens, tokens, room);
        let whole = attended.run(&mut b, &shares, room);
        let middle = runs[1].row..runs[2].row;
        let parts = [0..middle.start, middle.clone(), middle.end..tokens];
        let shares = Shares::in_parts(&shape, &runs, &parts, room);
        assert_eq!(shares.parts.iter().map(|part| part.rows.clone()).collect::<Vec<_>>(), parts);

        let Attended { attention, arrays, q, .. } = &attended;
        let heads = Heads { group: shape.num_heads / shape.num_kv_heads, head_dim: shape.head_dim, kv };
        let kernels = OffloadKernels::new(&b.device, heads).unwrap();
        let (count, stride) = (heads.group * offloaded, middle.len() + 3);
        let output = b.random(count * stride * shape.head_dim, 2.0);
        let uploaded = b.upload(&output);
        let step = StepArrays { shares: b.shares(&shares, shape.num_kv_heads), ..arrays.clone() };
        let of_middle = step.rows(&middle);
        let all = 0..shape.num_kv_heads;
        let mut run = |from_npu: bool| {
            let (partials, y) = (b.partials(&shape, room), b.empty(tokens, q.width));
            b.run(|k, r| {
                for (i, part) in shares.parts.iter().enumerate() {
                    let heads = if i == 1 { offloaded..all.end } else { all.clone() };
                    k.attention_partials(r, attention, (q, &partials), &step, part, &heads);
                }
                if from_npu {
                    let merges = (&of_middle.shares.merges, middle.len());
                    kernels.partials(r, &shape, (&uploaded, stride), offloaded, merges, &partials);
                } else {
                    let part = &shares.parts[1];
                    k.attention_partials(r, attention, (q, &partials), &step, part, &(0..offloaded));
                }
                k.attention_merge(r, &shape, &step, &partials, &Operand::floats(&y), tokens);
            });
            b.rows(&y, tokens).into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        assert!(run(false) == whole, "{shape:?}, {kv}: heads computed in two parts");
        let got = run(true);
        for (at, (got, whole)) in got.iter().zip(&whole).enumerate() {
            let (token, head, i) = (at / q.width, at % q.width / shape.head_dim, at % shape.head_dim);
            let expected = match middle.contains(&token) && head < count {
                true => output[(head * stride + token - middle.start) * shape.head_dim + i].to_bits(),
                false => *whole,
            };
            assert_eq!(*got, expected, "{shape:?}, {kv}: token {token}, head {head}, {i}");
        }
    }
}

#[test]
fn qkv_store_normalizes_rotates_and_stores() {
    with_each_body(40, |b| {
        let plain = LayerKind { has_qk_norms: false, ..LayerKind::default() };
        let kinds = [
            (LayerKind::default(), shape(4, 2, 32, 16, None)),
            (LayerKind::default(), shape(3, 1, 100, 5, None)),
            (LayerKind::default(), shape(2, 2, 256, 16, None)),
            (plain, shape(3, 1, 16, 16, None)),
            (plain, shape(6, 2, 80, 5, None)),
            (LayerKind { has_biases: true, ..plain }, shape(7, 1, 64, 16, None)),
            (LayerKind { has_biases: true, ..LayerKind::default() }, shape(4, 2, 100, 5, None)),
            (LayerKind { has_value_norm: true, ..LayerKind::default() }, shape(2, 1, 512, 16, None)),
            (LayerKind { has_value_norm: true, has_biases: true, ..plain }, shape(4, 2, 36, 5, None)),
        ];
        for ((layers, shape), kv) in kinds.iter().flat_map(|kind| KvDtype::ALL.map(|kv| (*kind, kv))) {
            b.make_layers(layers);
            b.make_heads(&shape, kv);
            let paged = Paged::new(b, shape, &[(3, 3), (40, 1), (21, 7)]);
            let tokens = paged.tokens();
            let n = tokens.len();
            let (d, half) = (shape.head_dim, shape.head_dim / 2);
            let (qw, kw) = (shape.num_heads * d, shape.num_kv_heads * d);
            let (q, k, v) = (b.random(n * qw, 2.0), b.random(n * kw, 2.0), b.random(n * kw, 2.0));
            let (q_norm, k_norm) = (b.random(d, 1.0), b.random(d, 1.0));
            let biases = [qw, kw, kw].map(|width| match layers.has_biases {
                true => b.random(width, 1.0),
                false => vec![0.0; width],
            });
            let angle =
                |position: usize, i: usize| position as f64 * 10000f64.powf(-(2.0 * i as f64) / d as f64);
            let rope: Vec<f32> = (0..64)
                .flat_map(|p| {
                    (0..half).flat_map(move |i| [angle(p, i).cos() as f32, angle(p, i).sin() as f32])
                })
                .collect();
            let (eps, q_scale) = (1e-6f32, 0.125f32);
            let [qa, ka, va] = [(&q, qw), (&k, kw), (&v, kw)].map(|(rows, width)| b.activations(rows, width));
            let [qn, kn, table] = [&q_norm, &k_norm, &rope].map(|data| b.upload(data));
            let bytes = paged.empty_cache(kv).len();
            let cache = KvCache { keys: b.poisoned(bytes), values: b.poisoned(bytes) };
            let arrays = paged.arrays(b);
            let qk_norms = layers.has_qk_norms.then(|| [qn, kn].map(|weight| RmsNorm { weight, eps }));
            let uploaded = layers.has_biases.then(|| biases.each_ref().map(|bias| b.upload(bias)));
            let cache_of_layer = cache.clone();
            let attention = Attention {
                shape,
                qk_norms,
                norm_eps: eps,
                biases: uploaded,
                rope: table,
                q_scale,
                shares_cache: false,
                cache: cache_of_layer,
            };
            // Values with a norm are the product of the keys.
            let (v, va) = if layers.has_value_norm { (&k, &ka) } else { (&v, &va) };
            b.run(|k, r| k.qkv_store(r, &attention, [&qa, &ka, va], &arrays, n));

            let with_bias = |row: &[f32], bias: &[f32]| -> Vec<f32> {
                row.iter().zip(bias).map(|(x, bias)| x + bias).collect()
            };
            let expect = |row: &[f32], norm: &[f32], position: usize, scale: f64| -> Vec<f64> {
                let mut row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                let angles: Vec<f64> = (0..half).map(|i| angle(position, i)).collect();
                if layers.has_qk_norms {
                    row = reference::rms_norm(&row, norm, f64::from(eps));
                }
                reference::rope(&row, &angles).into_iter().map(|v| v * scale).collect()
            };
            let got_q = b.rows(&qa, n);
            let mut keys = b.download::<u8>(&cache.keys, bytes);
            let mut values = b.download::<u8>(&cache.values, bytes);
            for (t, &(s, position)) in tokens.iter().enumerate() {
                let what = format!("{layers:?} {shape:?} {kv} sequence {s} position {position}");
                for head in 0..shape.num_heads {
                    let (at, of_head) = (t * qw + head * d, head * d..(head + 1) * d);
                    let row = with_bias(&q[at..at + d], &biases[0][of_head]);
                    let expected = expect(&row, &q_norm, position, f64::from(q_scale));
                    close(&got_q[at..at + d], &expected, &vec![1.0; d], 1e-6, &what);
                }
                for head in 0..shape.num_kv_heads {
                    let (at, place) = (t * kw + head * d, (s, position, head));
                    let of_head = head * d..(head + 1) * d;
                    let row = with_bias(&k[at..at + d], &biases[1][of_head.clone()]);
                    let expected = expect(&row, &k_norm, position, 1.0);
                    // The tolerance includes the rounding of the cache type: half of its last bit.
                    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                    let lost = [0.0, largest / 2048.0, largest / 254.0][kv as usize];
                    let got = paged.take(&mut keys, kv, Cached::Key, place);
                    close(&got, &expected, &vec![4.0; d], 1e-6 + lost / 4.0, &what);
                    let mut one = paged.empty_cache(kv);
                    let mut row = with_bias(&v[at..at + d], &biases[2][of_head]);
                    if layers.has_value_norm {
                        let exact: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                        let normed = reference::rms_norm(&exact, &vec![1.0; d], f64::from(eps));
                        row = normed.into_iter().map(|v| v as f32).collect();
                    }
                    let kept = paged.file_away(&mut one, kv, Cached::Value, place, &row);
                    let kept: Vec<f64> = kept.into_iter().map(f64::from).collect();
                    // A value in the middle between two integers may be rounded to either of them.
                    let step = [1e-6, 3.0 / 1024.0, 3.0 / 127.0][kv as usize];
                    let got = paged.take(&mut values, kv, Cached::Value, place);
                    close(&got, &kept, &vec![1.0; d], step * 1.01, &what);
                    let off =
                        got.iter().zip(&kept).filter(|(g, k)| (f64::from(**g) - **k).abs() > 1e-6).count();
                    assert!(off * 20 <= d, "{what}: {off} of {d} values are not the nearest");
                }
            }
            let poison = 0x7fc0_deadu32.to_le_bytes();
            let untouched = |bytes: &[u8]| bytes.chunks_exact(4).all(|word| word == poison);
            assert!(untouched(&keys) && untouched(&values), "{shape:?} {kv}: wrote beyond its slots");
        }
    });
}

#[test]
fn a_soft_cap_bounds_logits_of_any_size() {
    let mut b = Bench::new(45);
    for (rows, width, cap) in [(1, 1, 30.0f32), (3, 1001, 30.0), (2, 5000, 0.5)] {
        let mut x = b.random(rows * width, 3.0 * cap);
        x[..1].copy_from_slice(&[f32::MAX]);
        if width > 1 {
            x[1..4].copy_from_slice(&[f32::MIN, 0.0, 1e-6]);
        }
        let logits = b.activations(&x, width);
        b.run(|k, r| k.softcap(r, &logits, cap, rows));
        let cap = f64::from(cap);
        let expected: Vec<f64> = x.iter().map(|x| cap * (f64::from(*x) / cap).tanh()).collect();
        close(&b.rows(&logits, rows), &expected, &vec![cap; x.len()], 1e-6, &format!("{rows} x {width}"));
    }
}

#[test]
fn a_sum_is_multiplied_by_the_number_of_its_layer() {
    with_each_body(46, |b| {
        let (rows, dim, scale) = (3, 257, 0.37f32);
        let (x, base) = (b.random(rows * dim, 2.0), b.random(rows * dim, 1.0));
        let weight = b.random(dim, 1.0);
        let norm = RmsNorm { weight: b.upload(&weight), eps: 1e-6 };
        let input = b.activations(&x, dim);
        let (added, hidden) = (b.activations(&base, dim), b.activations(&base, dim));
        let output = b.empty(rows, dim);
        let to = Operand::floats(&output);
        b.run(|k, r| k.rms_norm_add(r, &input, (Some(&norm), scale), &added, rows));
        b.run(|k, r| k.residual(r, &input, (Some(&norm), scale), (&hidden, &norm), &to, rows));
        let rows_of = |all: &[f32]| -> Vec<Vec<f64>> {
            all.chunks_exact(dim).map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect()
        };
        let normed = |row: &[f64]| reference::rms_norm(row, &weight, 1e-6);
        let sums: Vec<Vec<f64>> = rows_of(&x)
            .iter()
            .zip(rows_of(&base))
            .map(|(x, base)| normed(x).iter().zip(base).map(|(x, b)| (x + b) * f64::from(scale)).collect())
            .collect();
        let next: Vec<f64> = sums.iter().flat_map(|row| normed(row)).collect();
        let sums = sums.concat();
        for got in [&added, &hidden] {
            close(&b.rows(got, rows), &sums, &vec![1.0; sums.len()], 1e-5, "sums");
        }
        close(&b.rows(&output, rows), &next, &vec![4.0; next.len()], 1e-5, "the next norm");
    });
}

#[test]
fn without_post_norms_the_result_of_a_sublayer_is_added_as_it_is() {
    with_each_body(41, |b| {
        b.make_layers(LayerKind { has_post_norms: false, ..LayerKind::default() });
        for (rows, dim) in [(1, 1), (3, 31), (5, 257), (2, 1153)] {
            let (x, base, weight) =
                (b.random(rows * dim, 2.0), b.random(rows * dim, 1.0), b.random(dim, 1.0));
            let sums: Vec<f32> = x.iter().zip(&base).map(|(x, base)| base + x).collect();
            let input = b.activations(&x, dim);
            let norm = RmsNorm { weight: b.upload(&weight), eps: 1e-6 };
            let (added, hidden) = (b.activations(&base, dim), b.activations(&base, dim));
            let output = b.empty(rows, dim);
            b.run(|k, r| k.rms_norm_add(r, &input, (None, 1.0), &added, rows));
            b.run(|k, r| {
                k.residual(r, &input, (None, 1.0), (&hidden, &norm), &Operand::floats(&output), rows)
            });
            assert_eq!(b.rows(&added, rows), sums, "{rows} x {dim}");
            assert_eq!(b.rows(&hidden, rows), sums, "{rows} x {dim}");
            let expected: Vec<f64> = sums
                .chunks_exact(dim)
                .flat_map(|row| {
                    let row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                    reference::rms_norm(&row, &weight, 1e-6)
                })
                .collect();
            let magnitude: Vec<f64> = expected.iter().map(|v| v.abs() + 0.1).collect();
            close(&b.rows(&output, rows), &expected, &magnitude, 3e-6, &format!("{rows} x {dim}"));
        }
    });
}

#[test]
fn moments_sum_the_squares_of_each_column() {
    let mut b = Bench::new(17);
    for (tokens, width) in [(1, 1), (3, 63), (17, 64), (5, 130)] {
        let x = b.random(tokens * width, 3.0);
        let before = b.random(width, 1.0);
        let (input, sums) = (b.activations(&x, width), b.upload(&before));
        b.run(|k, r| k.moments(r, &input, &sums, tokens));
        let got: Vec<f32> = b.download(&sums, width);
        let square = |t: usize, c: usize| f64::from(x[t * width + c]).powi(2);
        let expected: Vec<f64> = (0..width)
            .map(|c| f64::from(before[c]) + (0..tokens).map(|t| square(t, c)).sum::<f64>())
            .collect();
        let magnitude: Vec<f64> = (0..width)
            .map(|c| f64::from(before[c]).abs() + (0..tokens).map(|t| square(t, c)).sum::<f64>())
            .collect();
        close(&got, &expected, &magnitude, 2e-6, &format!("{tokens} x {width}"));
    }
}

#[test]
fn pooled_sums_are_the_same_for_every_split_of_the_rows() {
    let mut b = Bench::new(18);
    for (tokens, width) in [(1, 1), (3, 63), (17, 64), (40, 130)] {
        let x = b.random(tokens * width, 3.0);
        let input = b.activations(&x, width);
        let poison = vec![f32::NAN; width];
        let sum = |at_once: usize, b: &mut Bench| -> Vec<f32> {
            let sums = b.activations(&poison, width);
            for first in (0..tokens).step_by(at_once) {
                let rows = first..(first + at_once).min(tokens);
                b.run(|k, r| k.pool(r, &input.rows(&rows), &sums, first == 0, rows.len()));
            }
            b.download(&sums.buffer, width)
        };
        let whole = sum(tokens, &mut b);
        for at_once in [1, 7] {
            assert_eq!(sum(at_once, &mut b), whole, "{tokens} x {width}, {at_once} at once: to the bit");
        }
        let column =
            |c: usize, of: fn(f64) -> f64| (0..tokens).map(|t| of(f64::from(x[t * width + c]))).sum();
        let expected: Vec<f64> = (0..width).map(|c| column(c, |x| x)).collect();
        let magnitude: Vec<f64> = (0..width).map(|c| column(c, f64::abs)).collect();
        close(&whole, &expected, &magnitude, 2e-6, &format!("{tokens} x {width}"));
    }
}

#[test]
fn gated_products_match_their_twins_also_for_extreme_values() {
    with_each_body(50, |b| {
        let glu = |activation: HiddenAct| match activation {
            HiddenAct::GeluTanh => reference::geglu,
            HiddenAct::Silu => reference::swiglu,
        };
        let kinds = [HiddenAct::GeluTanh, HiddenAct::Silu];
        let shapes = [(1, 3), (7, 129), (3, 1000)];
        for (activation, (rows, width)) in
            kinds.into_iter().flat_map(|kind| shapes.map(|shape| (kind, shape)))
        {
            let glu: fn(f64, f64) -> f64 = glu(activation);
            b.make_layers(LayerKind { activation, ..LayerKind::default() });
            let mut gate = b.random(rows * width, 6.0);
            let up = b.random(rows * width, 3.0);
            gate[..3].copy_from_slice(&[-40.0, 60.0, 0.0]);
            if width > 3 {
                gate[3..11].copy_from_slice(&[-1e30, 1e30, -10.0, 10.0, -9.9, f32::MIN, -79.9, -80.1]);
            }
            let (g, u) = (b.activations(&gate, width), b.activations(&up, width));
            b.run(|k, r| k.glu(r, &g, &u, &Operand::floats(&g), rows));
            let expected: Vec<f64> =
                gate.iter().zip(&up).map(|(g, u)| glu(f64::from(*g), f64::from(*u))).collect();
            let magnitude: Vec<f64> = expected.iter().map(|e| e.abs() + 0.01).collect();
            close(&b.rows(&g, rows), &expected, &magnitude, 1e-5, &format!("{rows} x {width}"));

            // The second factor may be some columns of wider rows.
            let wide = 8 + Activations::stride_of(width) + 4;
            let all: Vec<f32> = up
                .chunks_exact(width)
                .flat_map(|row| [vec![f32::NAN; 8], row.to_vec(), vec![f32::NAN; wide - 8 - width]].concat())
                .collect();
            let (g, all) = (b.activations(&gate, width), b.activations(&all, wide));
            let u = all.columns(&(8..8 + width));
            b.run(|k, r| k.glu(r, &g, &u, &Operand::floats(&g), rows));
            close(&b.rows(&g, rows), &expected, &magnitude, 1e-5, &format!("columns, {rows} x {width}"));
        }
    });
}

/// Draws one id for each request from the same logits.
fn draw(b: &mut Bench, logits: &[f32], vocab: usize, requests: &[SampleRequest]) -> (Vec<u32>, Vec<u32>) {
    let repeated: Vec<f32> = requests.iter().flat_map(|_| logits.to_vec()).collect();
    let mut drawing = Drawing::new(b, &repeated, logits.len(), requests);
    drawing.logits.vocab = vocab;
    drawing.run(b);
    (b.download(&drawing.arrays.ids, requests.len()), b.download(&drawing.slots, 64))
}

#[test]
fn greedy_takes_the_highest_logit_and_of_ties_the_lowest_id() {
    let mut b = Bench::new(60);
    for len in [1, 2, 255, 256, 257, 5000] {
        let mut logits = b.random(len, 10.0);
        let request = SampleRequest { slot: 9, ..SampleRequest::default() };
        let best = |l: &[f32]| (0..l.len()).rev().max_by(|&a, &b| l[a].total_cmp(&l[b])).unwrap() as u32;
        let (ids, slots) = draw(&mut b, &logits, len, &[request]);
        assert_eq!((ids[0], slots[9]), (best(&logits), best(&logits)), "{len}");
        assert!(slots.iter().enumerate().all(|(i, s)| i == 9 || *s == 0x7fc0_dead), "wrote another slot");
        let tie = b.rng.random_range(0..len);
        logits[tie] = 11.0;
        logits[len - 1] = 11.0;
        assert_eq!(draw(&mut b, &logits, len, &[request]).0, [tie.min(len - 1) as u32], "{len}");
        // Padding rows of the vocabulary are never drawn.
        if len > 1 {
            logits[len - 1] = 100.0;
            assert_eq!(draw(&mut b, &logits, len - 1, &[request]).0, [best(&logits[..len - 1])], "{len}");
        }
    }
}

#[test]
fn non_finite_logits_are_refused() {
    let mut b = Bench::new(61);
    for (bad, at) in [(f32::NAN, 700), (f32::INFINITY, 3), (f32::NEG_INFINITY, 9), (f32::NAN, 0)] {
        for temperature in [0.0, 1.0] {
            let mut logits = b.random(1000, 5.0);
            logits[at] = bad;
            let request = SampleRequest { temperature, top_p: 0.9, ..SampleRequest::default() };
            let (ids, slots) = draw(&mut b, &logits, 1000, &[request]);
            assert_eq!((ids[0], slots[0]), (NO_TOKEN, 0), "{bad} at {at}, temperature {temperature}");
        }
    }
}

#[test]
fn sampling_draws_ids_that_pass_the_filters_and_match_the_noise() {
    let mut b = Bench::new(62);
    let cases = [
        // The cases are (temperature, top_k, top_p, min_p).
        (1.0, 0, 1.0, 0.0),
        (0.7, 40, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.0, 64, 0.95, 0.05),
        (2.0, 1, 1.0, 0.0),
        (0.01, 0, 0.5, 0.0),
        (1.0, 5000, 0.0, 0.0),
    ];
    let mut drawn = 0;
    for (temperature, top_k, top_p, min_p) in cases {
        for len in [300, 2049] {
            let logits = b.random(len, 6.0);
            let [t, p, least] = [temperature, top_p, min_p].map(f64::from);
            let left = reference::filtered(&logits, t, top_k, p, least);
            let candidates: Vec<usize> = left.iter().map(|(id, _)| *id).collect();
            let requests: Vec<SampleRequest> = (0..48)
                .map(|i| SampleRequest {
                    temperature,
                    top_k: top_k as u32,
                    top_p,
                    min_p,
                    seed_low: b.rng.random(),
                    seed_high: b.rng.random(),
                    position: i * 37,
                    slot: i,
                    ..SampleRequest::default()
                })
                .collect();
            let (ids, _) = draw(&mut b, &logits, len, &requests);
            for (request, id) in requests.iter().zip(ids) {
                let seed = u64::from(request.seed_low) | u64::from(request.seed_high) << 32;
                let (expected, margin) = reference::draw(&logits, &candidates, t, seed, request.position);
                let what = format!("{temperature} {top_k} {top_p} {min_p}, {len} logits, seed {seed}");
                assert!(candidates.contains(&(id as usize)), "{what}: {id} was filtered out");
                // Two candidates that are closer than f32 rounding may change places.
                if margin > 1e-4 {
                    assert_eq!(id as usize, expected, "{what}");
                    drawn += 1;
                }
            }
        }
    }
    assert!(drawn > 700, "too few draws with a clear result: {drawn}");
}

#[test]
fn probability_masses_are_summed_exactly() {
    let mut b = Bench::new(69);
    for (width, scale) in [(1, 5.0), (40, 1e-3), (4097, 5.0), (9001, 300.0), (262_208, 4.0)] {
        let temperatures = [1e-6, 0.013, 1.0, 7.7, 100.0, 1e30];
        let mut logits = b.random(width, scale);
        let first = logits[0];
        logits[width / 2..width / 2 + 3.min(width / 2)].fill(first);
        let half = SampleRequest { top_p: 0.5, ..SampleRequest::default() };
        let requests = temperatures.map(|temperature| SampleRequest { temperature, ..half });
        let repeated: Vec<f32> = requests.iter().flat_map(|_| logits.clone()).collect();
        let drawing = Drawing::new(&mut b, &repeated, width, &requests);
        drawing.sample(&b);
        let (rows, bins) = (requests.len(), 1024);
        let buffer = DrawScratch::of(&drawing.logits, rows).bins;
        let words = b.download::<u32>(&buffer, rows * 3 * bins);
        for (temperature, words) in temperatures.iter().zip(words.chunks_exact(3 * bins)) {
            let expected = reference::bins(&logits, *temperature, bins);
            for (bin, expected) in expected.iter().enumerate() {
                let mass = u64::from(words[bins + bin]) | u64::from(words[2 * bins + bin]) << 32;
                let what = format!("{width} ids, temperature {temperature}, bin {bin}");
                assert_eq!((words[bin], mass), *expected, "{what}");
            }
        }
    }
}

#[test]
fn probability_masses_are_powers_of_two() {
    let mut last = u64::MAX;
    for i in 0..400_000 {
        let t = i as f32 * 1e-4;
        let (mass, exact) = (reference::mass(t), 2f64.powi(40) * 2f64.powf(-f64::from(t)));
        assert!((mass as f64 - exact).abs() <= 1.0 + exact * 6e-9, "2^-{t}: {mass}, not {exact}");
        assert!(mass >= 1 && mass <= last, "2^-{t}: {mass} after {last}");
        last = mass;
    }
    assert_eq!(reference::mass(40.0), 0);
    for x in [1e-6f32, 0.1, 0.7, 1.0, 1.5, 2.0, 3.0, 1e28] {
        let exact = 1.0 / f64::from(x);
        assert!((f64::from(reference::reciprocal(x)) / exact - 1.0).abs() <= 2f64.powi(-24), "1 / {x}");
    }
}

/// Logits that are difficult for thresholds, with a name for messages.
fn hard_logits(b: &mut Bench, kind: usize, len: usize) -> (&'static str, Vec<f32>) {
    let random = b.random(len, 6.0);
    let each = |f: &mut dyn FnMut(usize, f32) -> f32| -> Vec<f32> {
        random.iter().enumerate().map(|(i, x)| f(i, *x)).collect()
    };
    match kind {
        0 => ("random", random),
        1 => ("all equal", vec![-3.25; len]),
        2 => ("two values", each(&mut |_, x| if x > 2.0 { 1.5 } else { -0.5 })),
        3 => ("ties", each(&mut |_, x| (x * 4.0).round() / 4.0)),
        4 => ("masses that vanish", each(&mut |_, x| x * 50.0)),
        5 => ("one far below", each(&mut |i, x| if i == 7 { -1e30 } else { x })),
        // More values than the lists hold are so close together that all of them are in one bin.
        6 => ("a crowd below one", each(&mut |i, x| if i == 5 { 9.0 } else { x * 1e-5 })),
        7 => ("large", each(&mut |_, x| 1e6 + x)),
        _ => ("of two scales", each(&mut |i, x| if i % 100 == 0 { x } else { x * 1e-4 - 4.0 })),
    }
}
const HARD: usize = 9;

/// A position at which `id` is drawn from `candidates` by a clear margin. `None` = such positions are too rare.
fn position_of(logits: &[f32], candidates: &[usize], id: usize, temperature: f32, seed: u64) -> Option<u32> {
    let t = f64::from(temperature);
    let max = candidates.iter().map(|id| logits[*id]).fold(f32::MIN, f32::max);
    let z = |id: usize| (f64::from(logits[id]) - f64::from(max)) / t;
    let least = candidates.iter().map(|id| z(*id).exp()).sum::<f64>().ln() - z(id);
    if least > 9.0 {
        return None;
    }
    (0..100_000).find(|position| {
        let random =
            reference::philox([seed as u32, (seed >> 32) as u32], [*position, id as u32 / 4, 0, 0])[id % 4];
        let v = (f64::from(random) + 0.5) / 4294967296.0;
        -(-(-v).ln_1p()).ln() > least && {
            let (best, margin) = reference::draw(logits, candidates, t, seed, *position);
            best == id && margin > 0.02
        }
    })
}

#[test]
fn sampling_filters_exactly_what_its_twin_filters() {
    let mut b = Bench::new(70);
    let (mut at_the_edge, mut behind_it) = (0, 0);
    let mut try_on = |b: &mut Bench, name: &str, logits: &[f32], rounds: usize| {
        let len = logits.len();
        let (mut requests, mut expected) = (vec![], vec![]);
        for round in 0..rounds {
            let pick = |b: &mut Bench, of: &[f32]| of[b.rng.random_range(0..of.len())];
            let temperature = pick(b, &[1e-6, 0.05, 0.7, 1.0, 1.0, 2.0, 100.0]);
            let top_k = [0, 0, 1, 2, 40, len / 2, len - 1, len, len + 5][b.rng.random_range(0..9)];
            let min_p = pick(b, &[0.0, 0.0, 0.0, 0.02, 0.5, 1.0]);
            let max = logits.iter().cloned().fold(f32::MIN, f32::max);
            let least = f64::from(max) + f64::from(min_p).ln() * f64::from(temperature);
            let unclear = 1e-5 * f64::from(temperature) + 1e-6 * least.abs();
            // The last bit of a logarithm may decide, and drivers differ in that bit.
            if min_p > 0.0 && logits.iter().any(|l| *l != max && (f64::from(*l) - least).abs() < unclear) {
                continue;
            }
            let least = if min_p == 1.0 { max } else { least.max(f64::from(f32::MIN)) as f32 };
            let kept = |top_p| reference::left(logits, temperature, top_k, top_p, least);
            let top_p = match round % 3 {
                0 => 1.0,
                1 => pick(b, &[0.0, 1e-8, 0.3, 0.9, 0.95, 0.9999]),
                // top_p is exactly the share of the most likely ids, or 2^-24 above it.
                _ => {
                    let mut all = kept(1.0);
                    all.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
                    let powers = reference::powers_below(logits, temperature);
                    let masses: Vec<u128> =
                        all.iter().map(|id| u128::from(reference::mass(powers[*id]))).collect();
                    let first = b.rng.random_range(0..all.len().min(200));
                    let (sum, total) = (masses[..=first].iter().sum::<u128>(), masses.iter().sum::<u128>());
                    let part = (((sum + 1) << 24) - 1) / total + b.rng.random_range(0..2);
                    part.min((1 << 24) - 1) as f32 / 2f32.powi(24)
                }
            };
            let left = kept(top_p);
            let seed = b.rng.random::<u64>();
            let request = SampleRequest {
                temperature,
                top_k: top_k as u32,
                top_p,
                min_p,
                seed_low: seed as u32,
                seed_high: (seed >> 32) as u32,
                ..SampleRequest::default()
            };
            let what = format!("{name}, {len} ids, {request:?}");
            let mut ask = |position: u32| {
                requests.push(SampleRequest { position, ..request });
                let (best, margin) = reference::draw(logits, &left, f64::from(temperature), seed, position);
                expected.push((best, margin, left.clone(), what.clone()));
            };
            ask(1 << 20);
            let lowest = *left.iter().min_by(|a, b| logits[**a].total_cmp(&logits[**b])).unwrap();
            if let Some(position) = position_of(logits, &left, lowest, temperature, seed) {
                at_the_edge += 1;
                ask(position);
            }
            let is_out = |id: &usize| logits[*id] < logits[lowest];
            let next = (0..len).filter(is_out).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            if let Some(next) = next {
                let more: Vec<usize> = left.iter().copied().chain([next]).collect();
                if let Some(position) = position_of(logits, &more, next, temperature, seed) {
                    behind_it += 1;
                    ask(position);
                }
            }
        }
        for (requests, expected) in requests.chunks(24).zip(expected.chunks(24)) {
            let (ids, _) = draw(b, logits, len, requests);
            for (id, (best, margin, left, what)) in ids.into_iter().zip(expected) {
                assert!(left.contains(&(id as usize)), "{what}: {id} is not among the {} left", left.len());
                if *margin > 0.02 {
                    assert_eq!(id as usize, *best, "{what}: of {} left", left.len());
                }
            }
        }
    };
    for kind in 0..HARD {
        for (len, rounds) in [(1, 3), (40, 18), (600, 18), (9001, 12)] {
            let (name, logits) = hard_logits(&mut b, kind, len);
            try_on(&mut b, name, &logits, rounds);
        }
    }
    let (name, logits) = hard_logits(&mut b, 0, 262_208);
    try_on(&mut b, name, &logits, 3);
    assert!(at_the_edge > 150, "too few draws of the last id within the thresholds: {at_the_edge}");
    assert!(behind_it > 150, "too few draws of the first id outside the thresholds: {behind_it}");
}

#[test]
fn sampling_runs_only_the_kernels_that_requests_need() {
    let b = &mut Bench::on(&Device::open(&policy()).unwrap(), 71);
    let logits = b.random(3 * 5000, 4.0);
    let greedy = SampleRequest { top_k: 3, top_p: 0.5, ..SampleRequest::default() };
    let plain = SampleRequest { temperature: 1.0, top_p: 1.0, top_k: 5000, ..SampleRequest::default() };
    let filtered = SampleRequest { top_k: 4999, ..plain };
    for (requests, dispatches) in
        [([greedy; 3], 2), ([greedy, plain, greedy], 3), ([plain, filtered, greedy], 4)]
    {
        let drawing = Drawing::new(b, &logits, 5000, &requests);
        let before = b.device.counts();
        drawing.sample(b);
        assert_eq!((b.device.counts() - before).dispatches, dispatches, "{requests:?}");
    }
}

#[test]
fn draws_are_the_same_alone_and_in_a_batch() {
    let mut b = Bench::new(72);
    let width = 9001;
    let logits = b.random(width, 3.0);
    let requests: Vec<SampleRequest> = (0..12)
        .map(|i| SampleRequest {
            temperature: if i % 4 == 0 { 0.0 } else { 0.9 },
            top_k: [0, 50, 0][i % 3],
            top_p: [1.0, 1.0, 0.8, 0.95][i / 3],
            position: i as u32,
            slot: i as u32,
            ..SampleRequest::default()
        })
        .collect();
    let (together, _) = draw(&mut b, &logits, width, &requests);
    let alone: Vec<u32> =
        requests.iter().map(|request| draw(&mut b, &logits, width, &[*request]).0[0]).collect();
    assert_eq!(alone, together);
}

#[test]
fn draws_follow_the_distribution() {
    let mut b = Bench::new(63);
    let logits = [0.0f32, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0];
    let expected = reference::filtered(&logits, 1.0, 0, 1.0, 0.0);
    let mut counts = [0u32; 7];
    let draws = 64 * 64;
    let plain = SampleRequest { temperature: 1.0, top_p: 1.0, ..SampleRequest::default() };
    for seed in 0..64 {
        let requests: Vec<SampleRequest> =
            (0..64).map(|i| SampleRequest { seed_low: seed, position: i, slot: i, ..plain }).collect();
        draw(&mut b, &logits, 7, &requests).0.iter().for_each(|&id| counts[id as usize] += 1);
    }
    // Chi-squared with 6 degrees of freedom exceeds 22.5 for one of a thousand seeds. The seeds are fixed.
    let chi: f64 = expected
        .iter()
        .map(|(id, p)| (f64::from(counts[*id]) - p * f64::from(draws)).powi(2) / (p * f64::from(draws)))
        .sum();
    assert!(chi < 22.5, "chi-squared {chi}: {counts:?}");
}

#[test]
fn sampling_penalties_and_biases_match_their_twin_and_are_cleared() {
    let mut b = Bench::new(64);
    for width in [1, 37, 258, 5003] {
        let Adjusted { drawing, expected, raw, .. } = adjusted(&mut b, width, 12);
        drawing.adjust(&b);
        let words = b.download::<u32>(&drawing.logits.adjusted.buffer, 12 * drawing.logits.adjusted.stride);
        for (row, expected) in expected.iter().enumerate() {
            if drawing.requests[row].mask > 0 {
                continue; // the sampler applies the mask itself
            }
            for (id, expected) in expected.iter().enumerate() {
                let word = words[row * drawing.logits.adjusted.stride + id];
                let got = match word {
                    0 => raw[row * width + id],
                    word => f32::from_bits(word ^ f32::NEG_INFINITY.to_bits()),
                };
                let forbidden = *expected == f32::NEG_INFINITY && got == f32::MIN;
                let near = (got - expected).abs() <= 1e-5 * (1.0 + expected.abs());
                assert!(forbidden || near, "{width}, row {row}, id {id}: {got}, not {expected}");
            }
        }
        assert_eq!(b.rows(&drawing.logits.raw, 12), raw, "the raw logits must not change");
        drawing.clear(&b);
        let cleared = b.rows(&drawing.logits.adjusted, 12);
        assert!(cleared.iter().all(|word| word.to_bits() == 0), "{width}: not cleared");
    }
}

#[test]
fn sampling_draws_only_ids_that_penalties_biases_and_masks_leave() {
    let mut b = Bench::new(65);
    let mut clear = 0;
    for width in [37, 258, 5003] {
        for _ in 0..4 {
            let Adjusted { drawing, width, expected, .. } = adjusted(&mut b, width, 24);
            drawing.run(&b);
            let ids = b.download::<u32>(&drawing.arrays.ids, 24);
            for (row, (id, expected)) in ids.into_iter().zip(&expected).enumerate() {
                let request = &drawing.requests[row];
                let what = format!("{width}, row {row}: {request:?}");
                assert!(expected[id as usize] > f32::NEG_INFINITY, "{what}: {id} is forbidden");
                if request.temperature == 0.0 {
                    let max = expected.iter().cloned().fold(f32::NEG_INFINITY, f32::max);
                    assert!(expected[id as usize] >= max - 1e-4, "{what}: {id}");
                    continue;
                }
                let temperature = f64::from(request.temperature);
                let left = reference::filtered(expected, temperature, 0, f64::from(request.top_p), 0.0);
                let candidates: Vec<usize> = left.iter().map(|(id, _)| *id).collect();
                let seed = u64::from(request.seed_low);
                let (best, margin) =
                    reference::draw(expected, &candidates, temperature, seed, request.position);
                if margin > 1e-3 {
                    assert_eq!(id as usize, best, "{what}");
                    clear += 1;
                }
            }
        }
    }
    assert!(clear > 180, "too few draws with a clear result: {clear}");
}

#[test]
fn sampling_with_every_id_forbidden_returns_no_token() {
    let mut b = Bench::new(66);
    let logits = b.random(100, 3.0);
    for temperature in [0.0, 1.0] {
        let masked = SampleRequest { temperature, top_p: 1.0, mask: 1, ..SampleRequest::default() };
        let mut drawing = Drawing::new(&mut b, &logits, 100, &[masked]);
        drawing.arrays.masks = b.upload(&[0u32; 4]);
        drawing.run(&b);
        assert_eq!(b.download::<u32>(&drawing.arrays.ids, 1), [NO_TOKEN]);
        // A masked NaN is still an error.
        drawing.arrays.masks = b.upload(&[1u32, 0, 0, 0]);
        drawing.run(&b);
        assert_eq!(b.download::<u32>(&drawing.arrays.ids, 1), [0]);
        let mut bad = logits.clone();
        bad[50] = f32::NAN;
        drawing.logits.raw = b.activations(&bad, 100);
        drawing.run(&b);
        assert_eq!(b.download::<u32>(&drawing.arrays.ids, 1), [NO_TOKEN]);
    }
}

#[test]
fn sampling_reports_log_probabilities_of_the_raw_distribution() {
    let mut b = Bench::new(67);
    for (width, vocab) in [(1, 1), (7, 6), (300, 257), (5003, 5000), (9001, 8999)] {
        let rows = 6;
        let mut logits = b.random(rows * width, 7.0);
        // Equal logits are ordered by id.
        logits[3 * width..][..vocab.min(9)].fill(7.5);
        // Equal logits of several workgroups are ordered by id too.
        if vocab > 4100 {
            logits[5 * width..][4090..4100].fill(7.5);
            logits[5 * width + 17] = 7.5;
        }
        let requests: Vec<SampleRequest> = (0..rows as u32)
            .map(|row| SampleRequest {
                temperature: 0.9,
                top_p: 0.5,
                seed_low: row,
                slot: row,
                biases: 1,
                logprobs: [0, 1, 2, 21, 6, 21][row as usize],
                ..SampleRequest::default()
            })
            .collect();
        let mut drawing = Drawing::new(&mut b, &logits, width, &requests);
        drawing.arrays.bias = b.upload(&[Bias { id: vocab as u32 - 1, bias: 5.0 }]);
        drawing.logits.vocab = vocab;
        drawing.run(&b);
        b.run(|k, r| k.logprobs(r, &drawing.logits, &drawing.arrays, rows));
        let ids = b.download::<u32>(&drawing.arrays.ids, rows);
        let words = b.download::<u32>(&drawing.arrays.logprobs, rows * LOGPROB_WORDS);
        for row in 0..rows {
            let expected = reference::log_softmax(&logits[row * width..][..vocab]);
            let words = &words[row * LOGPROB_WORDS..][..LOGPROB_WORDS];
            let what = format!("{vocab}, row {row}");
            let near = |word: u32, id: u32| {
                let got = f64::from(f32::from_bits(word));
                assert!((got - expected[id as usize]).abs() < 1e-4, "{what}: id {id} has {got}");
            };
            let wanted = requests[row].logprobs as usize;
            if wanted == 0 {
                assert!(words.iter().all(|word| *word == 0x7fc0_dead), "{what} requests none");
                continue;
            }
            near(words[0], ids[row]);
            let mut order: Vec<u32> = (0..vocab as u32).collect();
            let logit = |id: &u32| logits[row * width + *id as usize];
            order.sort_by(|x, y| logit(y).total_cmp(&logit(x)).then(x.cmp(y)));
            let top = words[1..].chunks_exact(2);
            for (n, pair) in top.enumerate().take(MAX_LOGPROBS) {
                match order.get(n) {
                    _ if n + 1 >= wanted => assert_eq!(*pair, [0x7fc0_dead; 2], "{what}: {n}"),
                    Some(&id) => {
                        assert_eq!(pair[0], id, "{what}: {n}");
                        near(pair[1], id);
                    }
                    None => assert_eq!(pair[0], NO_TOKEN, "{what}: {n}"),
                }
            }
        }
    }
}

#[test]
fn history_holds_each_tokens_id_at_its_slot_and_position() {
    let mut b = Bench::new(68);
    let (slots, slot_len) = (4, 90);
    // There are three sequences, in slots 2, 0 and 3. The id of the last token is the id that was sampled there.
    let sequence_of: Vec<u32> = [vec![0; 70], vec![1; 9], vec![2]].concat();
    let positions: Vec<u32> = [(13..83).collect::<Vec<_>>(), (0..9).collect(), vec![89]].concat();
    let mut ids: Vec<u32> = positions.iter().map(|p| 1000 + p).collect();
    ids[79] = LAST_SAMPLED | 3;
    let step = StepArrays {
        ids: b.upload(&ids),
        positions: b.upload(&positions),
        sequence_of: b.upload(&sequence_of),
        slot_mapping: b.poisoned(4),
        block_tables: b.poisoned(4),
        shares: b.shares(&Shares::default(), 1),
    };
    let (slots_of, sampled) = (b.upload(&[2u32, 0, 3]), b.upload(&[7u32, 7, 7, 55]));
    let history = History { ids: b.poisoned(4 * slots * slot_len), slot_len };
    b.run(|k, r| k.history(r, &step, &slots_of, &sampled, &history, ids.len()));
    let mut expected = vec![0x7fc0_dead; slots * slot_len];
    ids[79] = 55;
    for ((id, position), sequence) in ids.iter().zip(&positions).zip(&sequence_of) {
        expected[[2, 0, 3][*sequence as usize] * slot_len + *position as usize] = *id;
    }
    assert_eq!(b.download::<u32>(&history.ids, slots * slot_len), expected);
}

#[test]
fn philox_matches_its_published_vectors() {
    // Known-answer tests of the authors of Philox4x32-10.
    assert_eq!(reference::philox([0, 0], [0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    let ones = reference::philox([u32::MAX; 2], [u32::MAX; 4]);
    assert_eq!(ones, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
}

#[test]
fn the_multiply_adds_of_the_peak_kernel_sum_to_one_a_lane() {
    let mut b = Bench::new(110);
    let peak = Peak::new(&b.device).unwrap();
    for (workgroups, rounds) in [(1, 16), (3, 50)] {
        let words = Peak::bytes(workgroups) as usize / 4;
        let result = b.poisoned(4 * words + 64);
        b.run(|_, r| peak.record(r, &result, workgroups, rounds));
        let got = b.download::<u32>(&result, words + 16);
        assert!(got[..words].iter().all(|word| f32::from_bits(*word) == 32.0), "{workgroups} x {rounds}");
        let beyond = &got[words..];
        assert!(beyond.iter().all(|word| *word == 0x7fc0_dead), "written beyond {workgroups} workgroups");
    }
}

/// `unicorn-lab kernels` measures kernels as a model runs them. Each case runs repeatedly and writes numbers.
#[test]
fn benchmark_cases_run_and_write_numbers() {
    let mut b = Bench::new(111);
    let small =
        ModelSpec { vocab_size: 2000, intermediate_size: 300, ..arch::shape("gemma-3-270m").unwrap().spec() };
    let heads = AttentionHeads { num_attention_heads: 6, num_key_value_heads: 3, head_dim: 32 };
    let layers = small.layers.iter().map(|layer| LayerSpec { heads, ..*layer }).collect();
    let odd = ModelSpec { hidden_size: 96, layers, ..small.clone() };
    let mixture = arch::shape("gemma-4-26b-a4b").unwrap().spec();
    let of_eight = Experts { count: 8, per_token: 2, renormalizes: true };
    let mixture = ModelSpec {
        vocab_size: 2000,
        hidden_size: 96,
        intermediate_size: 300,
        mixture: mixture.mixture.map(|each| Mixture { experts: of_eight, intermediate_size: 64, ..each }),
        ..mixture
    };
    let mut rig = Rig::new(&b.device).unwrap();
    let choices = [
        (small.clone(), KvDtype::F16, Precision::F32),
        (odd.clone(), KvDtype::Int8, Precision::F32),
        (small, KvDtype::F16, Precision::Fast),
        (mixture.clone(), KvDtype::F16, Precision::F32),
        (mixture, KvDtype::F16, Precision::Fast),
    ];
    for (spec, kv, precision) in choices {
        let (schemes, embedding) = (vec![Scheme::int4(32), Scheme::Bf16], Scheme::Int8Row);
        let choice = Choice {
            name: "small".into(),
            spec,
            schemes,
            embedding,
            kv,
            precision,
            tokens: vec![1, 3],
            depths: vec![20],
        };
        for case in choice.cases() {
            let prepared = rig.prepare(&case).unwrap();
            let words = prepared.output.size() as usize / 4;
            let before = b.download::<u32>(&prepared.output, words);
            b.run(|_, r| (0..2).for_each(|i| prepared.record(r, i)));
            let after = b.download::<u32>(&prepared.output, words);
            match case.work {
                KernelWork::Sample { vocab, .. } => {
                    assert!(after.iter().all(|id| (*id as usize) < vocab), "{}: {after:?}", case.name);
                }
                // Int8 results are tested elsewhere, together with the products that read them.
                KernelWork::Gated { .. }
                | KernelWork::Attention { .. }
                | KernelWork::RmsNorm { .. }
                | KernelWork::Residual { .. }
                | KernelWork::Glu { .. }
                    if precision == Precision::Fast =>
                {
                    assert!(before != after, "{}: nothing was written", case.name);
                }
                _ => {
                    let finite = after.iter().all(|word| f32::from_bits(*word).is_finite());
                    assert!(finite && before != after, "{}: {:?}", case.name, &after[..8]);
                }
            }
        }
    }
    // A device with timestamps measures the time, with enough repetitions for the requested span.
    let choice = Choice {
        name: "odd".into(),
        spec: odd,
        schemes: vec![],
        embedding: Scheme::Bf16,
        kv: KvDtype::F16,
        precision: Precision::F32,
        tokens: vec![1],
        depths: vec![],
    };
    let case =
        choice.cases().into_iter().find(|case| matches!(case.work, KernelWork::RmsNorm { .. })).unwrap();
    let prepared = rig.prepare(&case).unwrap();
    let mut recorded = 0;
    let span = rig.time(1, &mut |r, i| {
        recorded += 1;
        prepared.record(r, i);
    });
    let span = span.unwrap().expect("a device with a clock");
    assert_eq!(recorded, 1 + 1 + span.repeats, "two warm-up runs and one measured run");
}

#[test]
fn conflicting_commands_are_ordered() {
    // Each step reads the result of the step before. Without barriers, some steps would read old values.
    let mut b = Bench::new(70);
    let dim = 4096;
    let norm = RmsNorm { weight: b.upload(&vec![0f32; dim]), eps: 1e-6 };
    let x: Vec<f32> = b.random(dim, 1.0);
    let (mut from, mut to) = (b.activations(&x, dim), b.empty(1, dim));
    let (first, second) = (from.clone(), to.clone());
    b.run(|k, r| {
        for _ in 0..50 {
            k.rms_norm(r, &from, &norm, &Operand::floats(&to), 1);
            std::mem::swap(&mut from, &mut to);
        }
    });
    let mut expected: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    for _ in 0..50 {
        expected = reference::rms_norm(&expected, &vec![0.0; dim], 1e-6);
    }
    for buffer in [&first, &second] {
        close(&b.rows(buffer, 1), &expected, &vec![2.0; dim], 1e-5, "ping-pong");
    }
}

#[test]
fn validation_is_loaded_and_catches_a_violation() {
    // The test opens its own device, because the message that it provokes must not fail other tests.
    let device = Device::open(&DevicePolicy { validation: true, ..policy() }).unwrap();
    let mut arena = Arena::new(&device);
    let buffer = arena.alloc(MemoryKind::Device, Class::Staging, 1024, "violated").unwrap();
    let mut commands = CommandBuffer::new(&device, "violation").unwrap();
    let mut recorder = commands.begin().unwrap();
    // The offset of vkCmdFillBuffer must be a multiple of 4 (VUID-vkCmdFillBuffer-dstOffset-00025).
    recorder.fill(&buffer.slice(1, 64), 0);
    recorder.submit_alone("violation").unwrap();
    let error = commands.wait().unwrap_err().to_string();
    assert!(error.contains("vkCmdFillBuffer") && error.contains("multiple of 4"), "{error}");
    assert!(!device.validation_log().take().is_empty());
}

/// The device writes a key to the block after the last one of a cache. A child process does it, because it ends there.
#[test]
fn a_write_beyond_a_buffer_ends_at_its_guard_page() {
    const BEYOND: &str = "UNICORN_TEST_BEYOND";
    if device().info().kind != DeviceKind::Cpu {
        return skip("guard-pages");
    }
    if std::env::var_os(BEYOND).is_none() {
        let test = "kernels::twins::a_write_beyond_a_buffer_ends_at_its_guard_page";
        let mut child = Command::new(std::env::current_exe().expect("a path"));
        child.args(["--exact", test]).env("UNICORN_TEST_GUARD_PAGES", "1").env(BEYOND, "1");
        let ended = child.output().expect("it starts");
        assert_eq!(ended.status.signal(), Some(libc::SIGSEGV), "{ended:?}");
        return;
    }
    let (mut b, shape) = (Bench::new(44), shape(4, 2, 32, 16, None));
    b.make_heads(&shape, KvDtype::F16);
    let paged = Paged::new(&mut b, shape, &[(3, 3)]);
    let rows = b.random(3 * 4 * 32, 1.0);
    let [q, k, v] = [128, 64, 64].map(|width| b.activations(&rows[..3 * width], width));
    let bytes = paged.empty_cache(KvDtype::F16).len();
    let cache = KvCache { keys: b.poisoned(bytes), values: b.poisoned(bytes) };
    let norm = RmsNorm { weight: b.upload(&[1f32; 32]), eps: 1e-6 };
    let attention = Attention {
        shape,
        qk_norms: Some([norm.clone(), norm]),
        norm_eps: 1e-6,
        biases: None,
        rope: b.upload(&[0f32; 64 * 32]),
        q_scale: 1.0,
        shares_cache: false,
        cache,
    };
    let after = (paged.num_blocks * shape.block_size) as u32;
    let step = StepArrays { slot_mapping: b.upload(&[0, 1, after]), ..paged.arrays(&mut b) };
    b.run(|kernels, r| kernels.qkv_store(r, &attention, [&q, &k, &v], &step, 3));
}
