//! Cuts a step into submits.
//!
//! A submit should take no longer than the device's driver, or a desktop on the same device, can wait. If a segment
//! takes too long, its layers are submitted one by one; if a layer takes too long, its tokens are submitted in parts. A
//! layer can be cut by tokens because a token needs only the keys and values of the tokens before it. The tokens of an image
//! need those of the whole image: in a step with images, all tokens are projected before the first part of attention.
//!
//! A layer in which a coprocessor takes part is cut where the host passes inputs to the coprocessor, and where the host
//! takes its output: a submit ends with [`StepPart::Gather`], and one begins with [`StepPart::Join`].
//!
//! This file does not know what a layer computes.

use std::ops::Range;
use std::time::Duration;

use super::memory::LEAST_ROWS;
use super::rates::{Rates, WorkAmount};

/// Number of layers in a segment.
pub(crate) const SEGMENT_LAYERS: usize = 4;

/// A part of a step that is recorded separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StepPart {
    /// The work before the layers.
    Opening,
    /// Some layers, for all tokens. A layer is in the same segment in every step.
    Segment(Range<usize>),
    /// One layer, for some of the step's tokens.
    Layer { layer: usize, rows: Range<usize> },
    /// The work before attention in a layer that is cut around attention, for some of the step's tokens.
    Projections { layer: usize, rows: Range<usize> },
    /// Writes the coprocessor's inputs. The submit ends with it, because the host reads them.
    Gather { layer: usize },
    /// Attention, or the device's own share of it, for some of the step's tokens.
    Attention { layer: usize, rows: Range<usize> },
    /// The coprocessor's share, computed by the device because the coprocessor failed. No plan has this part.
    Recompute { layer: usize, rows: Range<usize> },
    /// Takes the coprocessor's output. A submit begins with it, because the host waits for the coprocessor before it.
    Join { layer: usize },
    /// The work after attention in a layer that is cut around attention, for some of the step's tokens.
    Rest { layer: usize, rows: Range<usize> },
    /// The work after the layers: the logits, and the draws from them.
    Closing,
}

/// The parts of one submit, and their work together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Submit {
    pub parts: Vec<StepPart>,
    pub work: WorkAmount,
}

/// The work of one layer for all tokens of a step.
#[derive(Debug, Clone)]
pub(super) struct LayerWork {
    /// Number of weights in the layer's matrices.
    pub weights: u64,
    /// Bytes of keys and values that attention reads for the tokens that are the only ones of their sequence in the
    /// step.
    pub reading: u64,
    /// Multiply-adds of attention for all other tokens.
    pub attention: u64,
    /// How attention is shared with a coprocessor, if it is.
    pub shared: Option<SharedWork>,
    /// Number of weights of the matrices before attention, if a token may see tokens after it.
    pub projected_first: Option<u64>,
}

/// The work of a layer whose attention is shared with a coprocessor.
#[derive(Debug, Clone)]
pub(super) struct SharedWork {
    /// The rows whose attention is shared.
    pub rows: Range<usize>,
    /// Number of weights of the matrices before attention.
    pub projections: u64,
    /// Bytes of keys and values that are gathered for the coprocessor.
    pub gathered: u64,
    /// Multiply-adds of attention of the shared rows, and how many of them are the device's own share.
    pub all: u64,
    pub own: u64,
}

impl LayerWork {
    /// The layer's work for `rows` of the step's `tokens` tokens.
    fn of(&self, rows: usize, tokens: usize) -> WorkAmount {
        WorkAmount::products(self.weights, rows) + self.attention_of(rows, tokens)
    }

    /// The attention of `rows` of the step's `tokens` tokens.
    fn attention_of(&self, rows: usize, tokens: usize) -> WorkAmount {
        let share = |of: u64| (u128::from(of) * rows as u128 / tokens as u128) as u64;
        WorkAmount::reading(share(self.reading)) + WorkAmount::attention(share(self.attention))
    }

    /// The number of tokens of each part, such that no part is expected to take longer than `limit`.
    fn rows(&self, tokens: usize, rates: &Rates, limit: Duration) -> usize {
        rows_of_parts(tokens, &|rows| rates.time(self.of(rows, tokens)) <= limit)
    }

    /// The attention of `rows` of the step's `tokens` tokens, all of it, and the device's own share.
    fn attention(&self, shared: &SharedWork, rows: &Range<usize>, tokens: usize) -> [WorkAmount; 2] {
        let share = |of: u64, some: usize, all: usize| match all {
            0 => 0,
            all => (u128::from(of) * some as u128).div_ceil(all as u128) as u64,
        };
        let inside = rows.end.min(shared.rows.end).saturating_sub(rows.start.max(shared.rows.start));
        let (outside, others) = (rows.len() - inside, tokens - shared.rows.len());
        let reading = WorkAmount::reading(share(self.reading, outside, others));
        [shared.all, shared.own].map(|of_shared| {
            let of_others = share(self.attention - shared.all, outside, others);
            reading + WorkAmount::attention(of_others + share(of_shared, inside, shared.rows.len()))
        })
    }
}

/// The number of tokens of each part of `tokens` tokens, where `fits` says whether a part may have that many.
fn rows_of_parts(tokens: usize, fits: &dyn Fn(usize) -> bool) -> usize {
    if fits(tokens) {
        return tokens;
    }
    let most = (1..=tokens / LEAST_ROWS).rev().map(|n| n * LEAST_ROWS).find(|rows| fits(*rows));
    let most = most.unwrap_or(LEAST_ROWS);
    // The parts have about equal sizes, and are no more than parts of `most` tokens would be.
    tokens.div_ceil(tokens.div_ceil(most)).next_multiple_of(LEAST_ROWS).min(tokens)
}

/// The submits of a step while they are built.
struct Cutting<'a> {
    submits: Vec<Submit>,
    /// Whether the next part begins a new submit, even if it would fit into the last one.
    is_closed: bool,
    tokens: usize,
    rates: &'a Rates,
    limit: Duration,
}

impl Cutting<'_> {
    fn add(&mut self, part: StepPart, work: WorkAmount) {
        match self.submits.last_mut() {
            Some(last)
                if !self.is_closed
                    && (last.work.is_nothing() || self.rates.time(last.work + work) <= self.limit) =>
            {
                last.parts.push(part);
                last.work += work;
            }
            _ => self.submits.push(Submit { parts: vec![part], work }),
        }
        self.is_closed = false;
    }

    /// Adds a part for all tokens, cut so that no piece takes longer than the limit.
    fn add_rows(
        &mut self,
        part: impl Fn(Range<usize>) -> StepPart,
        work: impl Fn(Range<usize>) -> WorkAmount,
    ) {
        let each = rows_of_parts(self.tokens, &|rows| self.rates.time(work(0..rows)) <= self.limit);
        for first in (0..self.tokens).step_by(each) {
            let rows = first..(first + each).min(self.tokens);
            self.add(part(rows.clone()), work(rows));
        }
    }

    /// Adds a layer, all of whose tokens are projected before attention.
    fn add_in_stages(&mut self, layer: usize, work: &LayerWork, projections: u64) {
        let products = |weights: u64| move |rows: Range<usize>| WorkAmount::products(weights, rows.len());
        let tokens = self.tokens;
        self.add_rows(|rows| StepPart::Projections { layer, rows }, products(projections));
        let attention = |rows: Range<usize>| work.attention_of(rows.len(), tokens);
        self.add_rows(|rows| StepPart::Attention { layer, rows }, attention);
        self.add_rows(|rows| StepPart::Rest { layer, rows }, products(work.weights - projections));
    }

    /// Adds a layer whose attention is shared.
    fn add_shared(&mut self, layer: usize, work: &LayerWork, shared: &SharedWork) {
        let tokens = self.tokens;
        let products = |weights: u64| move |rows: Range<usize>| WorkAmount::products(weights, rows.len());
        self.add_rows(|rows| StepPart::Projections { layer, rows }, products(shared.projections));
        let last = self.submits.last_mut().expect("just added");
        last.parts.push(StepPart::Gather { layer });
        last.work += WorkAmount::reading(shared.gathered);
        self.is_closed = true;
        // The parts are small enough for all of attention, because the device computes it if the coprocessor fails.
        let most = |rows: usize| {
            let starts = (0..tokens).step_by(rows);
            let each = starts.map(|first| first..(first + rows).min(tokens));
            each.map(|rows| self.rates.time(work.attention(shared, &rows, tokens)[0])).max()
        };
        let each = rows_of_parts(tokens, &|rows| most(rows) <= Some(self.limit));
        for first in (0..tokens).step_by(each) {
            let rows = first..(first + each).min(tokens);
            let [_, own] = work.attention(shared, &rows, tokens);
            self.add(StepPart::Attention { layer, rows }, own);
        }
        self.is_closed = true;
        self.add(StepPart::Join { layer }, WorkAmount::default());
        self.add_rows(|rows| StepPart::Rest { layer, rows }, products(work.weights - shared.projections));
    }
}

/// Cuts a step of `tokens` tokens into submits that are expected to take no longer than `limit`. If even a part of the
/// smallest size takes longer, it is a separate submit. `opening` is the work before the layers, and `closing` holds the
/// work after them, if any, and whether it is submitted alone.
pub(super) fn plan(
    layers: &[LayerWork],
    tokens: usize,
    (opening, closing): (WorkAmount, Option<(WorkAmount, bool)>),
    rates: &Rates,
    limit: Duration,
) -> Vec<Submit> {
    let submits = vec![Submit { parts: vec![StepPart::Opening], work: opening }];
    let mut cutting = Cutting { submits, is_closed: false, tokens, rates, limit };
    for (first, segment) in (0..).step_by(SEGMENT_LAYERS).zip(layers.chunks(SEGMENT_LAYERS)) {
        let is_shared = segment.iter().any(|layer| layer.shared.is_some());
        let whole = segment.iter().fold(WorkAmount::default(), |sum, layer| sum + layer.of(tokens, tokens));
        if !is_shared && rates.time(whole) <= limit {
            cutting.add(StepPart::Segment(first..first + segment.len()), whole);
            continue;
        }
        for (layer, work) in (first..).zip(segment) {
            if let Some(shared) = &work.shared {
                cutting.add_shared(layer, work, shared);
                continue;
            }
            let each = work.rows(tokens, rates, limit);
            if let Some(projections) = work.projected_first.filter(|_| each < tokens) {
                cutting.add_in_stages(layer, work, projections);
                continue;
            }
            for first in (0..tokens).step_by(each) {
                let rows = first..(first + each).min(tokens);
                let share = work.of(rows.len(), tokens);
                cutting.add(StepPart::Layer { layer, rows }, share);
            }
        }
    }
    match closing {
        None => {}
        Some((work, false)) => cutting.add(StepPart::Closing, work),
        Some((work, true)) => cutting.submits.push(Submit { parts: vec![StepPart::Closing], work }),
    }
    cutting.submits
}

/// Submits of the same parts, except that every layer is a separate part, which is recorded for one step.
pub(super) fn layer_by_layer(submits: Vec<Submit>, tokens: usize) -> Vec<Submit> {
    let parts_of = |part: StepPart| match part {
        StepPart::Segment(layers) => layers.map(|layer| StepPart::Layer { layer, rows: 0..tokens }).collect(),
        part => vec![part],
    };
    let each =
        |Submit { parts, work }| Submit { parts: parts.into_iter().flat_map(parts_of).collect(), work };
    submits.into_iter().map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The rates of a device that takes a second for `narrow` weights of few tokens, for `wide` multiply-adds of many
    /// tokens, and for `attention` multiply-adds of attention.
    fn rates(narrow: f64, wide: f64, attention: f64) -> Rates {
        let mut rates = Rates::default();
        let second = Some(Duration::from_secs(1));
        rates.learn(WorkAmount::products(narrow as u64, 1), second);
        rates.learn(WorkAmount::products(wide as u64 / 64, 64), second);
        rates.learn(WorkAmount::attention(attention as u64), second);
        rates
    }

    #[test]
    fn work_is_cut_where_it_exceeds_the_limit() {
        use StepPart::{Closing, Opening, Segment};
        let layer = |layer, rows| StepPart::Layer { layer, rows };
        // Each of these takes a millisecond: 10 weights of few tokens, 10 multiply-adds of many tokens, one of
        // attention.
        let rates = rates(10_000.0, 10_000.0, 1000.0);
        let works = |attention: &[u64]| -> Vec<LayerWork> {
            attention
                .iter()
                .map(|&attention| LayerWork {
                    weights: 0,
                    reading: 0,
                    attention,
                    shared: None,
                    projected_first: None,
                })
                .collect()
        };
        let parts = |layers: &[LayerWork], tokens, closing: Option<u64>, ms| -> Vec<Vec<StepPart>> {
            let closing = closing.map(|ms| (WorkAmount::attention(ms), false));
            let outside = (WorkAmount::default(), closing);
            plan(layers, tokens, outside, &rates, ms * MS).into_iter().map(|submit| submit.parts).collect()
        };
        assert_eq!(
            parts(&works(&[1; 9]), 5, Some(2), 100),
            [[Opening, Segment(0..4), Segment(4..8), Segment(8..9), Closing]],
            "in one go"
        );
        assert_eq!(
            parts(&works(&[3; 9]), 5, Some(9), 24),
            [vec![Opening, Segment(0..4), Segment(4..8)], vec![Segment(8..9), Closing]]
        );
        // The third layer exceeds the limit of a segment, but not of a submit.
        let third = vec![layer(2, 0..40), layer(3, 0..40)];
        assert_eq!(
            parts(&works(&[3, 3, 20, 3, 3]), 40, None, 25),
            [vec![Opening, layer(0, 0..40), layer(1, 0..40)], third, vec![Segment(4..5)]]
        );
        // One layer alone exceeds the limit: its tokens go in parts of about one size, none smaller than the least
        // size.
        assert_eq!(
            parts(&works(&[50]), 40, None, 21),
            [vec![Opening, layer(0, 0..16)], vec![layer(0, 16..32)], vec![layer(0, 32..40)]]
        );
        assert_eq!(parts(&works(&[9000]), 7, Some(1), 1), [vec![Opening, layer(0, 0..7)], vec![Closing]]);
        // Eight tokens read the weights once, and the ninth reads them again: smaller parts would read them as often.
        let weights =
            [LayerWork { weights: 100, reading: 0, attention: 0, shared: None, projected_first: None }];
        assert_eq!(parts(&weights, 9, None, 25), [[Opening, Segment(0..1)]]);
        assert_eq!(parts(&weights, 9, None, 1), [vec![Opening, layer(0, 0..8)], vec![layer(0, 8..9)]]);
        let outside = (WorkAmount::default(), Some((WorkAmount::attention(3), true)));
        let all = plan(&works(&[50; 7]), 40, outside, &rates, 21 * MS);
        let sum = all.iter().fold(WorkAmount::default(), |sum, submit| sum + submit.work);
        assert_eq!(sum, WorkAmount::attention(353));
        assert_eq!(all.last().expect("some").parts, [Closing], "alone");
        let opened = plan(&works(&[18]), 40, (WorkAmount::attention(5), None), &rates, 21 * MS);
        let opened: Vec<_> = opened.into_iter().map(|submit| submit.parts).collect();
        assert_eq!(opened, [[Opening], [Segment(0..1)]]);
    }

    #[test]
    fn all_tokens_of_a_step_with_images_are_projected_before_attention() {
        use StepPart::{Attention, Closing, Opening, Projections, Rest, Segment};
        let rates = rates(10_000.0, 10_000.0, 1000.0);
        // For 40 tokens: 40 ms of projections, 60 ms of attention, and 80 ms of other products.
        let projected_first = Some(10);
        let layer = LayerWork { weights: 30, reading: 0, attention: 60, shared: None, projected_first };
        let closing = Some((WorkAmount::attention(1), false));
        let parts = |ms| -> Vec<Vec<StepPart>> {
            let outside = (WorkAmount::default(), closing);
            let all = plan(std::slice::from_ref(&layer), 40, outside, &rates, ms * MS);
            all.into_iter().map(|submit| submit.parts).collect()
        };
        assert_eq!(parts(1000), [[Opening, Segment(0..1), Closing]], "in one go");
        let expected = [
            vec![Opening, Projections { layer: 0, rows: 0..40 }],
            vec![Attention { layer: 0, rows: 0..24 }],
            vec![Attention { layer: 0, rows: 24..40 }],
            vec![Rest { layer: 0, rows: 0..24 }],
            vec![Rest { layer: 0, rows: 24..40 }, Closing],
        ];
        assert_eq!(parts(50), expected);
    }

    #[test]
    fn a_layer_that_is_shared_is_cut_where_the_host_hands_over() {
        use StepPart::{Attention, Closing, Gather, Join, Opening, Projections, Rest, Segment};
        let rates = rates(10_000.0, 10_000.0, 1000.0);
        let plain =
            |attention| LayerWork { weights: 0, reading: 0, attention, shared: None, projected_first: None };
        // Attention has 10 multiply-adds, 6 of them for the shared rows, and half of those are the device's own.
        let shared = SharedWork { rows: 3..36, projections: 0, gathered: 0, all: 6, own: 3 };
        let shared = LayerWork { shared: Some(shared), ..plain(10) };
        let layers = [plain(1), shared.clone(), shared.clone(), plain(2), plain(3)];
        let (tokens, closing) = (40, Some((WorkAmount::attention(1), false)));
        let parts = |layers: &[LayerWork], ms| -> Vec<Vec<StepPart>> {
            let outside = (WorkAmount::default(), closing);
            plan(layers, tokens, outside, &rates, ms * MS).into_iter().map(|submit| submit.parts).collect()
        };
        let [rows, layer] = [|| 0..40, || 0..40];
        let expected = [
            vec![
                Opening,
                StepPart::Layer { layer: 0, rows: layer() },
                Projections { layer: 1, rows: rows() },
                Gather { layer: 1 },
            ],
            vec![Attention { layer: 1, rows: rows() }],
            vec![
                Join { layer: 1 },
                Rest { layer: 1, rows: rows() },
                Projections { layer: 2, rows: rows() },
                Gather { layer: 2 },
            ],
            vec![Attention { layer: 2, rows: rows() }],
            vec![
                Join { layer: 2 },
                Rest { layer: 2, rows: rows() },
                StepPart::Layer { layer: 3, rows: layer() },
                Segment(4..5),
                Closing,
            ],
        ];
        assert_eq!(parts(&layers, 100), expected);
        // The parts of attention are so small that the whole attention keeps to the limit, not only the device's own
        // share.
        let cut = parts(std::slice::from_ref(&shared), 5);
        let attention = |from: usize, to: usize| vec![Attention { layer: 0, rows: from..to }];
        assert!(cut.len() > 4 && cut.contains(&attention(0, 16)), "{cut:?}");
        let outside = (WorkAmount::default(), None);
        let own: Vec<WorkAmount> = plan(std::slice::from_ref(&shared), tokens, outside, &rates, 5 * MS)
            .into_iter()
            .filter(|submit| matches!(submit.parts[0], Attention { .. }))
            .map(|submit| submit.work)
            .collect();
        let sum = own.iter().fold(WorkAmount::default(), |sum, work| sum + *work);
        assert!(rates.time(sum) >= 7 * MS && rates.time(sum) <= 11 * MS, "{own:?}");
        // A coprocessor with all heads leaves no attention of its rows to the device.
        let all = SharedWork { rows: 0..40, own: 0, all: 10, ..shared.shared.clone().expect("it is") };
        let all = LayerWork { shared: Some(all), ..shared };
        let nothing = plan(&[all], tokens, outside, &rates, 100 * MS);
        assert_eq!(nothing[1], Submit { parts: attention(0, 40), work: WorkAmount::default() });
    }

    /// A device with a scripted clock: `truth` alone determines the time of a submit.
    struct Clock {
        /// How many times slower the device is than the machine that this program is made for.
        slowness: f64,
        rates: Rates,
        submits: usize,
        longest: Duration,
    }

    impl Clock {
        const LIMIT: Duration = Duration::from_millis(200);
        const LAYERS: usize = 62;
        const WEIGHTS: u64 = 412_900_000;
        const HEADS: u64 = 32 * 128;

        /// Runs a step of a 27B with `tokens` tokens at the end of `depth` keys each. Every sixth layer sees all keys.
        fn step(&mut self, tokens: usize, depth: u64) {
            let layers: Vec<LayerWork> = (1..=Self::LAYERS)
                .map(|i| if i % 6 == 0 { depth } else { depth.min(1024) })
                .map(|keys| LayerWork {
                    weights: Self::WEIGHTS,
                    reading: 0,
                    attention: 2 * Self::HEADS * keys * tokens as u64,
                    shared: None,
                    projected_first: None,
                })
                .collect();
            let outside = (WorkAmount::default(), Some((WorkAmount::draws(1_409_000_000, 1), false)));
            for Submit { parts, work } in plan(&layers, tokens, outside, &self.rates, Self::LIMIT) {
                let seconds: f64 = parts.iter().map(|part| self.truth(part, &layers, tokens)).sum();
                let took = Duration::from_secs_f64(seconds * self.slowness);
                self.rates.learn(work, Some(took));
                self.submits += 1;
                self.longest = self.longest.max(took);
            }
        }

        fn truth(&self, part: &StepPart, layers: &[LayerWork], tokens: usize) -> f64 {
            let one = |layer: usize, rows: usize| {
                let attention = layers[layer].attention as f64 * rows as f64 / tokens as f64;
                // Few tokens use a sixteenth of the GPU.
                let attending = if rows < 16 { 2e11 } else { 6e11 };
                let (reading, computing) = (rows.div_ceil(8) as f64 / 130e9, rows as f64 / 0.9e12);
                f64::max(reading, computing) * Self::WEIGHTS as f64 + attention / attending + 2e-4
            };
            match part {
                StepPart::Opening => 1e-4,
                StepPart::Closing => 0.03,
                StepPart::Segment(layers) => layers.clone().map(|layer| one(layer, tokens)).sum(),
                StepPart::Layer { layer, rows } => one(*layer, rows.len()),
                other => panic!("nothing is shared here: {other:?}"),
            }
        }
    }

    /// Guards against one rate for all kinds of work. With one rate, a step of 128 tokens at 131,072 keys went uncut
    /// after decodes: it took the device two seconds, as long as a driver waits before it resets the device.
    #[test]
    fn no_submit_is_far_beyond_the_limit_when_a_deep_prefill_follows_decodes() {
        for slowness in [0.05, 0.3, 1.0, 3.0] {
            let mut clock = Clock { slowness, rates: Rates::default(), submits: 0, longest: Duration::ZERO };
            (0..300).for_each(|i| clock.step(1, 100 + i));
            (0..300).for_each(|i| clock.step(16, 100 + i));
            for n in 0..16 {
                clock.step(128, 131_072 - 128 * (16 - n));
            }
            let limit = Clock::LIMIT;
            assert!(clock.longest <= 2 * limit, "{slowness}: {:?}", clock.longest);
            // The plan also uses the limit: submits of the last step take about as long as they may.
            clock.submits = 0;
            (0..4).for_each(|_| clock.step(128, 131_072));
            let wide = Clock { slowness, rates: Rates::default(), submits: 0, longest: Duration::ZERO };
            let deep = LayerWork {
                weights: Clock::WEIGHTS,
                reading: 0,
                attention: 2 * Clock::HEADS * 131_072 * 128,
                shared: None,
                projected_first: None,
            };
            let near = LayerWork { attention: 2 * Clock::HEADS * 1024 * 128, ..deep.clone() };
            let [deep, near] = [deep, near].map(|layer| wide.truth(&StepPart::Segment(0..1), &[layer], 128));
            let seconds = 4.0 * (10.0 * deep + 52.0 * near + 0.03) * slowness;
            let needed = (seconds / limit.as_secs_f64()).max(4.0);
            assert!(clock.submits as f64 <= 4.0 * needed, "{slowness}: {} submits, {needed}", clock.submits);
        }
    }
}
