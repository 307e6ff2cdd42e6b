//! The kernels of a vision tower against their twins.

use unicorn::kernels::{GridTables, HiddenAct, LayerNorm, Operand, PixelScale, Standardize, VisionKernels};

use crate::support::kernel_bench::{Bench, close, download_blocks, with_each_body};
use crate::support::reference;

fn kernels(b: &Bench) -> VisionKernels {
    VisionKernels::new(&b.device, b.bodies(), HiddenAct::GeluTanh).unwrap()
}

#[test]
fn patches_are_the_pixels_of_a_convolution_channel_by_channel() {
    let mut b = Bench::new(90);
    let own = kernels(&b);
    for ([width, height], patch) in
        [([14, 14], 7), ([6, 15], 3), ([32, 16], 16), ([5, 5], 5), ([28, 28], 14), ([10, 4], 2)]
    {
        let pixels: Vec<u8> =
            b.random(3 * width * height, 1.0).iter().map(|x| (x.abs() * 255.9) as u8).collect();
        let mut bytes = pixels.clone();
        bytes.resize(pixels.len().next_multiple_of(4), 77);
        let scale = PixelScale { factors: [0.5, 0.25, 2.0], shifts: [-1.0, 3.0, 0.125] };
        let across = width / patch;
        let (rows, elements) = (across * (height / patch), 3 * patch * patch);
        let (input, out) = (b.upload(&bytes), b.empty(rows, elements));
        b.run(|_, r| own.patches(r, (&input, [width, height]), patch, &scale, &out));
        let got = b.rows(&out, rows);
        for row in 0..rows {
            for (element, got) in got[row * elements..][..elements].iter().enumerate() {
                let (channel, inside) = (element / (patch * patch), element % (patch * patch));
                let y = row / across * patch + inside / patch;
                let x = row % across * patch + inside % patch;
                let level = f32::from(pixels[(y * width + x) * 3 + channel]);
                let expected = level * scale.factors[channel] + scale.shifts[channel];
                assert_eq!(*got, expected, "{width} * {height} / {patch}, patch {row}, element {element}");
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
            // Without a residual stream, its sum with x is the input.
            let sums_before_bias: Vec<f32> = hidden.iter().zip(&x).map(|(hidden, x)| hidden + x).collect();
            let stream: Vec<_> = (0..3).map(|_| b.activations(&hidden, width)).collect();
            let [floats, both, of_alone] = [(); 3].map(|()| b.empty(rows, width));
            let [blocks, quantized, of_both] = [(); 3].map(|()| b.quantized(rows, width));
            let alone = b.activations(&sums_before_bias, width);
            b.run(|k, r| {
                let x = (&input, &bias_buffer);
                own.add_and_norm(r, x, (&stream[0], &norm), &Operand::floats(&floats), rows);
                own.add_and_norm(r, x, (&stream[1], &norm), &Operand::blocks(&blocks), rows);
                let to = Operand { floats: Some(both.clone()), blocks: Some(of_both.clone()) };
                own.add_and_norm(r, x, (&stream[2], &norm), &to, rows);
                own.norm(r, (&alone, &bias_buffer), &norm, &Operand::floats(&of_alone), rows);
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
            let alone_sums: Vec<f32> =
                (0..rows * width).map(|i| sums_before_bias[i] + bias[i % width]).collect();
            assert_eq!(b.rows(&alone, rows), alone_sums, "{what}: the sum with a bias alone");
            let got_alone = b.rows(&of_alone, rows);
            for row in 0..rows {
                let of_row = row * width..(row + 1) * width;
                for (sums, got) in [(&sums, &got), (&alone_sums, &got_alone)] {
                    let values: Vec<f64> = sums[of_row.clone()].iter().map(|x| f64::from(*x)).collect();
                    let expected = reference::layer_norm(&values, &weight, &shift, f64::from(eps));
                    // A sum of f32 is off by some of its last digit, which the division by a small deviation enlarges.
                    let bound = 2e-6 * (1.0 + f64::from(common));
                    close(&got[of_row.clone()], &expected, &vec![4.0; width], bound, &what);
                }
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
    for ([across, down], pool, width) in
        [([4, 4], 2, 5), ([12, 8], 4, 144), ([6, 15], 3, 65), ([3, 1], 1, 7), ([2, 2], 2, 1152)]
    {
        let x = b.random(across * down * width, 3.0);
        let [bias, scale] = [(); 2].map(|()| b.random(width, 2.0));
        let squares = across / pool;
        let rows = squares * (down / pool);
        let standardize = Standardize { factor: 12.0, bias: b.upload(&bias), scale: b.upload(&scale) };
        let (input, plain, standardized) =
            (b.activations(&x, width), b.empty(rows, width), b.empty(rows, width));
        b.run(|_, r| {
            own.average_pool(r, (&input, [across, down]), pool, None, &plain);
            own.average_pool(r, (&input, [across, down]), pool, Some(&standardize), &standardized);
        });
        let mut expected = vec![0.0; rows * width];
        for (token, row) in x.chunks_exact(width).enumerate() {
            let square = token / across / pool * squares + token % across / pool;
            for (to, x) in expected[square * width..].iter_mut().zip(row) {
                *to += f64::from(*x) / (pool * pool) as f64;
            }
        }
        let what = format!("{across} * {down} / {pool} x {width}");
        close(&b.rows(&plain, rows), &expected, &vec![3.0; rows * width], 1e-6, &what);
        for (i, mean) in expected.iter_mut().enumerate() {
            *mean = (*mean * 12.0 - f64::from(bias[i % width])) * f64::from(scale[i % width]);
        }
        close(&b.rows(&standardized, rows), &expected, &vec![80.0; rows * width], 1e-6, &what);
    }
}

#[test]
fn a_grid_has_the_sum_of_a_column_and_a_row_at_each_position() {
    let mut b = Bench::new(94);
    let own = kernels(&b);
    for ([across, down], width) in [([1, 1], 1), ([3, 5], 7), ([7, 2], 144), ([2, 9], 65)] {
        let [of_columns, of_rows] = [across, down].map(|side| b.random((side + 1) * width, 1.0));
        let before = b.random(across * down * width, 1.0);
        let tables = GridTables {
            of_columns: b.activations(&of_columns, width),
            of_rows: b.activations(&of_rows, width),
        };
        let (alone, added) = (b.empty(across * down, width), b.activations(&before, width));
        b.run(|_, r| {
            own.grid(r, &tables, [across, down], &alone);
            own.add_grid(r, &tables, [across, down], &added);
        });
        let sum = |i: usize| {
            let (position, column) = (i / width, i % width);
            of_columns[position % across * width + column] + of_rows[position / across * width + column]
        };
        let sums: Vec<f32> = (0..before.len()).map(sum).collect();
        assert_eq!(b.rows(&alone, across * down), sums, "{across} * {down} x {width}");
        let sums: Vec<f32> = before.iter().zip(sums).map(|(before, sum)| before + sum).collect();
        assert_eq!(b.rows(&added, across * down), sums, "{across} * {down} x {width}, added");
    }
}
