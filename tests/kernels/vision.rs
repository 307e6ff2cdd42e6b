//! The kernels of a vision tower against their twins.

use unicorn::kernels::{HiddenAct, LayerNorm, Operand, PixelScale, VisionKernels};

use crate::support::kernel_bench::{Bench, close, download_blocks, with_each_body};
use crate::support::reference;

fn kernels(b: &Bench) -> VisionKernels {
    VisionKernels::new(&b.device, b.bodies(), HiddenAct::GeluTanh).unwrap()
}

#[test]
fn patches_are_the_pixels_of_a_convolution_channel_by_channel() {
    let mut b = Bench::new(90);
    let own = kernels(&b);
    for (side, patch) in [(14, 7), (6, 3), (32, 16), (5, 5), (28, 14)] {
        let pixels: Vec<u8> =
            b.random(3 * side * side, 1.0).iter().map(|x| (x.abs() * 255.9) as u8).collect();
        let mut bytes = pixels.clone();
        bytes.resize(pixels.len().next_multiple_of(4), 77);
        let scale = PixelScale { factors: [0.5, 0.25, 2.0], shifts: [-1.0, 3.0, 0.125] };
        let across = side / patch;
        let (rows, width) = (across * across, 3 * patch * patch);
        let (input, out) = (b.upload(&bytes), b.empty(rows, width));
        b.run(|_, r| own.patches(r, &input, [side, patch], &scale, &out));
        let got = b.rows(&out, rows);
        for row in 0..rows {
            for (element, got) in got[row * width..][..width].iter().enumerate() {
                let (channel, inside) = (element / (patch * patch), element % (patch * patch));
                let y = row / across * patch + inside / patch;
                let x = row % across * patch + inside % patch;
                let level = f32::from(pixels[(y * side + x) * 3 + channel]);
                let expected = level * scale.factors[channel] + scale.shifts[channel];
                assert_eq!(*got, expected, "{side} / {patch}, patch {row}, element {element}");
            }
        }
    }
}

#[test]
fn a_sum_and_its_layer_norm_match_their_twins() {
    with_each_body(91, |b| {
        let own = kernels(b);
        // A large common part: the difference of mean squares would lose it.
        for (rows, width, common) in
            [(1, 3, 0.0), (5, 129, 0.0), (3, 1152, 40.0), (2, 1025, 1000.0), (7, 48, 1.0)]
        {
            let [x, hidden] = [1.0, 3.0].map(|scale| b.random(rows * width, scale));
            let hidden: Vec<f32> = hidden.iter().map(|x| x + common).collect();
            let [bias, weight, shift] = [(); 3].map(|()| b.random(width, 1.0));
            let eps = 1e-3;
            let norm = LayerNorm { weight: b.upload(&weight), bias: b.upload(&shift), eps };
            let (input, bias_buffer) = (b.activations(&x, width), b.upload(&bias));
            let stream: Vec<_> = (0..3).map(|_| b.activations(&hidden, width)).collect();
            let [floats, both] = [(); 2].map(|()| b.empty(rows, width));
            let [blocks, quantized, of_both] = [(); 3].map(|()| b.quantized(rows, width));
            b.run(|k, r| {
                let x = (&input, &bias_buffer);
                own.add_and_norm(r, x, (&stream[0], &norm), &Operand::floats(&floats), rows);
                own.add_and_norm(r, x, (&stream[1], &norm), &Operand::blocks(&blocks), rows);
                let to = Operand { floats: Some(both.clone()), blocks: Some(of_both.clone()) };
                own.add_and_norm(r, x, (&stream[2], &norm), &to, rows);
                k.quantize(r, &floats, &quantized, rows);
            });
            let what = format!("{rows} x {width}, {common}");
            let sums: Vec<f32> = (0..rows * width).map(|i| hidden[i] + (x[i] + bias[i % width])).collect();
            let got = b.rows(&floats, rows);
            for stream in &stream {
                assert_eq!(b.rows(stream, rows), sums, "{what}: the sum");
            }
            assert_eq!(b.rows(&both, rows), got, "{what}: both forms");
            let all = [&blocks, &quantized, &of_both].map(|blocks| download_blocks(b, blocks, rows));
            assert!(all[0] == all[1] && all[0] == all[2], "{what}: int8");
            for row in 0..rows {
                let of_row = row * width..(row + 1) * width;
                let values: Vec<f64> = sums[of_row.clone()].iter().map(|x| f64::from(*x)).collect();
                let expected = reference::layer_norm(&values, &weight, &shift, f64::from(eps));
                // A sum of f32 is off by some of its last digit, which the division by a small deviation enlarges.
                let bound = 2e-6 * (1.0 + f64::from(common));
                close(&got[of_row], &expected, &vec![4.0; width], bound, &what);
            }
        }
    });
}

#[test]
fn an_activation_after_a_bias_matches_its_twin_also_for_extreme_values() {
    with_each_body(92, |b| {
        let own = kernels(b);
        for (rows, width) in [(1, 3), (7, 129), (3, 1000), (2, 4304)] {
            let mut x = b.random(rows * width, 6.0);
            x[0] = 1e4;
            x[1] = -1e4;
            let bias = b.random(width, 1.0);
            let [floats, both, hidden] = [(); 3].map(|()| b.activations(&x, width));
            let [blocks, quantized, of_both] = [(); 3].map(|()| b.quantized(rows, width));
            let of_columns = b.upload(&bias);
            b.run(|k, r| {
                own.activate(r, (&floats, &of_columns), &Operand::floats(&floats), rows);
                own.activate(r, (&hidden, &of_columns), &Operand::blocks(&blocks), rows);
                let to = Operand { floats: Some(both.clone()), blocks: Some(of_both.clone()) };
                own.activate(r, (&both, &of_columns), &to, rows);
                k.quantize(r, &floats, &quantized, rows);
            });
            let what = format!("{rows} x {width}");
            let got = b.rows(&floats, rows);
            assert_eq!(b.rows(&both, rows), got, "{what}: both forms");
            let all = [&blocks, &quantized, &of_both].map(|blocks| download_blocks(b, blocks, rows));
            assert!(all[0] == all[1] && all[0] == all[2], "{what}: int8");
            let sum = |i: usize| f64::from(x[i] + bias[i % width]);
            let expected: Vec<f64> = (0..x.len()).map(|i| reference::geglu(sum(i), 1.0)).collect();
            let magnitude: Vec<f64> = (0..x.len()).map(|i| sum(i).abs().max(1.0)).collect();
            close(&got, &expected, &magnitude, 2e-6, &what);
        }
    });
}

#[test]
fn pooled_squares_are_the_means_of_their_tokens() {
    let mut b = Bench::new(93);
    let own = kernels(&b);
    for (side, pool, width) in [(4, 2, 5), (12, 4, 144), (6, 3, 65), (3, 1, 7), (2, 2, 1152)] {
        let x = b.random(side * side * width, 3.0);
        let across = side / pool;
        let (input, out) = (b.activations(&x, width), b.empty(across * across, width));
        b.run(|_, r| own.average_pool(r, &input, [side, pool], &out));
        let got = b.rows(&out, across * across);
        let mut expected = vec![0.0; got.len()];
        for (token, row) in x.chunks_exact(width).enumerate() {
            let square = token / side / pool * across + token % side / pool;
            for (to, x) in expected[square * width..].iter_mut().zip(row) {
                *to += f64::from(*x) / (pool * pool) as f64;
            }
        }
        close(&got, &expected, &vec![3.0; got.len()], 1e-6, &format!("{side} / {pool} x {width}"));
    }
}
