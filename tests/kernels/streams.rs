//! The kernels of several residual streams against their twins.

use unicorn::kernels::{AltUp, RmsNorm, StreamKernels};

use crate::support::kernel_bench::{Bench, close, with_each_body};
use crate::support::reference;

const EPS: f64 = 1e-6;
/// Rows and widths of the streams: fewer columns than lanes, odd widths, and more columns than a workgroup takes at once.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (5, 64), (2, 129), (1, 1027), (3, 2048)];

fn kernels(b: &Bench) -> StreamKernels {
    StreamKernels::new(&b.device, b.bodies()).unwrap()
}

/// Row `row` of each stream.
fn row_of(streams: &[Vec<f32>; 4], row: usize, width: usize) -> [Vec<f64>; 4] {
    streams.each_ref().map(|stream| stream[row * width..][..width].iter().map(|x| f64::from(*x)).collect())
}

#[test]
fn predictions_and_corrections_of_streams_match_their_twins() {
    with_each_body(210, |b| {
        let own = kernels(b);
        for (rows, width) in SHAPES {
            // The sum over a row is divided by the width, so the router needs large weights to have an effect.
            let router = b.random(4 * width, 3.0 * (width as f32).sqrt());
            let [norm, output_scale] = [(); 2].map(|()| b.random(width, 1.0));
            let [prediction, correction] = [64, 16].map(|count| b.random(count, 1.0));
            let altup = AltUp {
                router_norm: RmsNorm { weight: b.upload(&norm), eps: EPS as f32 },
                router: b.upload(&router),
                prediction: b.upload(&prediction),
                correction: b.upload(&correction),
                output_scale: b.upload(&output_scale),
            };
            let streams: [Vec<f32>; 4] = [2.0, 1.0, 3.0, 0.5].map(|scale| b.random(rows * width, scale));
            let before = b.random(rows * width, 1.0);
            let load = |b: &mut Bench| streams.each_ref().map(|stream| b.activations(stream, width));
            let (predicted, corrected) = (load(b), load(b));
            let (active, first) = (b.empty(rows, width), b.empty(rows, width));
            let base = b.activations(&before, width);
            b.run(|_, r| {
                own.predict(r, &altup, predicted.each_ref(), &active, rows);
                own.correct(r, &altup, corrected.each_ref(), &base, &first, rows);
            });
            let what = format!("{rows} x {width}");
            let of = |coefficients| reference::AltUp { norm: &norm, router: &router, coefficients, eps: EPS };
            for row in 0..rows {
                let x = row_of(&streams, row, width);
                let before: Vec<f64> = before[row * width..][..width].iter().map(|x| f64::from(*x)).collect();
                let by_hand = of(&prediction).predict(&x);
                let after = of(&correction).correct(&x, &before);
                for i in 0..4 {
                    for (got, expected, pass) in
                        [(&predicted[i], &by_hand[i], "prediction"), (&corrected[i], &after[i], "correction")]
                    {
                        let got = &b.rows(got, rows)[row * width..][..width];
                        close(
                            got,
                            expected,
                            &vec![8.0; width],
                            2e-6,
                            &format!("{what}, {pass} of {i}, row {row}"),
                        );
                    }
                }
                let got = &b.rows(&active, rows)[row * width..][..width];
                assert_eq!(got, &b.rows(&predicted[0], rows)[row * width..][..width], "{what}");
                let scaled: Vec<f64> =
                    after[0].iter().zip(&output_scale).map(|(x, scale)| x * f64::from(*scale)).collect();
                let got = &b.rows(&first, rows)[row * width..][..width];
                close(got, &scaled, &vec![8.0; width], 2e-6, &format!("{what}, first, row {row}"));
            }
        }
    });
}

#[test]
fn streams_get_the_size_of_the_first_one_and_their_mean_replaces_it() {
    with_each_body(211, |b| {
        let own = kernels(b);
        for (rows, width) in SHAPES {
            // The mean square of the third stream is below the least one that a factor is computed with.
            let streams: [Vec<f32>; 4] = [2.0, 100.0, 1e-3, 0.5].map(|scale| b.random(rows * width, scale));
            let load = |b: &mut Bench| streams.each_ref().map(|stream| b.activations(stream, width));
            let (spread, merged) = (load(b), load(b));
            b.run(|_, r| {
                own.spread(r, spread.each_ref(), rows);
                own.merge(r, merged.each_ref(), rows);
            });
            for row in 0..rows {
                let [hidden, others @ ..] = row_of(&streams, row, width);
                let matched = others.map(|other| reference::with_size_of(&hidden, &other));
                let part = |b: &mut Bench, from| b.rows(from, rows)[row * width..][..width].to_vec();
                assert_eq!(part(b, &spread[0]), streams[0][row * width..][..width], "{rows} x {width}");
                for (i, expected) in (1..).zip(&matched) {
                    let got = part(b, &spread[i]);
                    let magnitude: Vec<f64> = expected.iter().map(|x| x.abs() + 0.1).collect();
                    close(&got, expected, &magnitude, 2e-6, &format!("{rows} x {width}, stream {i}"));
                }
                let [second, third, fourth] = &matched;
                let mean = |at: usize| (hidden[at] + second[at] + third[at] + fourth[at]) / 4.0;
                let mean: Vec<f64> = (0..width).map(mean).collect();
                close(
                    &part(b, &merged[0]),
                    &mean,
                    &vec![4.0; width],
                    2e-6,
                    &format!("{rows} x {width}, mean"),
                );
                for i in 1..4 {
                    assert_eq!(part(b, &merged[i]), streams[i][row * width..][..width], "{rows} x {width}");
                }
            }
        }
    });
}

#[test]
fn a_cutoff_leaves_what_exceeds_the_mean_by_some_deviations() {
    with_each_body(212, |b| {
        let own = kernels(b);
        // A large common part: the difference of mean squares would lose the deviation.
        let of_row =
            [(1.644_853_6, 0.0), (0.0, 3.0), (1.644_853_6, 1000.0), (-0.5, 0.0), (1.0, 50.0), (3.0, 0.0)];
        for ((rows, width), (deviations, common)) in SHAPES.into_iter().zip(of_row) {
            let x: Vec<f32> = b.random(rows * width, 1.0).iter().map(|x| x + common).collect();
            let gate = b.activations(&x, width);
            b.run(|_, r| own.cutoff(r, &gate, deviations, rows));
            let got = b.rows(&gate, rows);
            for row in 0..rows {
                let values: Vec<f64> = x[row * width..][..width].iter().map(|x| f64::from(*x)).collect();
                let expected = reference::cutoff(&values, f64::from(deviations));
                let magnitude = vec![1.0 + f64::from(common); width];
                close(
                    &got[row * width..][..width],
                    &expected,
                    &magnitude,
                    2e-6,
                    &format!("{rows} x {width}, row {row}"),
                );
            }
        }
    });
}
