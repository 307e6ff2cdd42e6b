//! Measures which of several choices is fastest on a device, once for each driver, version of the shaders, and shapes
//! of a model's matrices. All choices give the same bits.
//!
//! The choices are: the way of each kind of product in each class of widths ([`GpuTiles`]), and the kind of queue. The
//! choice that is best by count ([`Tiles::of`]) stays unless another one is faster by more than the variation of
//! measurements, or if the time for measuring is used up. A way that the device refuses, or that yields wrong bits, is
//! not chosen. A CPU device has no choices.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::memory::{LOGIT_ROWS, Schemes};
use super::rig::{Products, Rig};
use super::spec::ModelSpec;
use super::tensors::{Projections, TensorSpec};
use crate::gpu::{Device, DeviceInfo, DevicePolicy, GpuError, QueueKind, timed};
use crate::kernels::{ActivationsFrom, GpuTiles, ProductKind, SubgroupTile, Tiles, WIDTH_CLASSES, Way};
use crate::tensor::{Precision, Scheme};

/// A choice is better if it takes less than this share of the time.
const CLEARLY: f64 = 0.95;
/// Number of measurements of each choice; the median counts.
const RUNS: usize = 3;
/// The time for all measurements. It is checked between them.
const BUDGET: Duration = Duration::from_secs(10);
/// The number of tokens with which each of [`WIDTH_CLASSES`] is measured: the most of the class, or of many prompts.
const TOKENS: [usize; WIDTH_CLASSES.len()] = [1, 8, 32, 64, 256];
/// Classes of at least so many tokens may be computed in several passes, or by subgroups.
const SEVERAL_PASSES: usize = 32;
/// The numbers of tokens with which the kinds of queues are compared.
const FEW_AND_MANY: [usize; 2] = [1, 32];

/// What is measured.
#[derive(Debug, Clone)]
pub struct Trial {
    /// At most one matrix for each kind of product: its scheme, and its rows and columns.
    pub matrices: Vec<(ProductKind, Scheme, [usize; 2])>,
    /// The tile of subgroups that is compared with lanes.
    pub subgroups: Option<SubgroupTile>,
    /// The time for all measurements.
    pub budget: Duration,
}

impl Trial {
    /// The largest matrix of each kind of product of a model with these schemes. A kind without int8 products has no
    /// matrix.
    pub fn of(device: &DeviceInfo, config: &ModelSpec, schemes: &Schemes) -> Trial {
        let bytes = |(_, scheme, [rows, cols]): &(_, Scheme, [usize; 2])| scheme.bytes(*rows, *cols);
        let of = |kind, (spec, scheme): (&TensorSpec, Scheme)| (kind, scheme, [spec.rows(), spec.cols()]);
        let mut all = vec![of(ProductKind::Head, (config.head(), schemes.head()))];
        for (specs, schemes) in config.tensors.layers.iter().zip(&schemes.layers) {
            // The products of experts are computed in the way of plain products.
            let Projections { q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, .. } =
                specs.projections.as_ref().zip(*schemes);
            let pair = match (gate_proj, up_proj) {
                (Some(gate), Some(up)) if gate.1 == up.1 => ProductKind::Gated,
                _ => ProductKind::Plain,
            };
            all.extend(gate_proj.into_iter().chain(up_proj).map(|one| of(pair, one)));
            let others = [q_proj, o_proj].into_iter().chain(k_proj).chain(v_proj).chain(down_proj);
            all.extend(others.map(|one| of(ProductKind::Plain, one)));
        }
        all.retain(|(_, scheme, _)| Precision::Fast.quantizes(*scheme));
        let largest = |kind| all.iter().filter(|(of, ..)| *of == kind).max_by_key(|one| bytes(one)).copied();
        let matrices = ProductKind::ALL.into_iter().filter_map(largest).collect();
        Trial { matrices, subgroups: SubgroupTile::of(device), budget: BUDGET }
    }

    /// The name of the cached file.
    fn cache_name(&self) -> String {
        let hash = Sha256::digest(format!("{:?}", self.matrices));
        format!("tuning-{}", hash[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

/// The fastest choices of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    pub queue: QueueKind,
    pub tiles: GpuTiles,
}

/// The device on its fastest queue, and its tiles, from the cached measurement or from a new one. The memory of the
/// trial's matrices is free again afterwards.
pub fn tuned(
    device: Arc<Device>,
    policy: &DevicePolicy,
    trial: &Trial,
) -> Result<(Arc<Device>, Tiles), GpuError> {
    let Tiles::Gpu(counted) = Tiles::of(&device) else { return Ok((device, Tiles::Cpu)) };
    if trial.matrices.is_empty() {
        return Ok((device, Tiles::Gpu(counted)));
    }
    let name = &device.info().name;
    let tuned = match read_cached(&device, trial) {
        Some(tuned) => tuned,
        None => {
            tracing::info!(
                "measuring what {name} does best with this model (once, {} s at most; --no-tune leaves it out)",
                trial.budget.as_secs()
            );
            let measured = match measured(&device, policy, counted, trial) {
                Ok(Some(tuned)) => Ok(tuned),
                Ok(None) => Err("its queue has no clock".to_owned()),
                Err(error) if device.is_lost() => return Err(error),
                Err(error) => Err(error.to_string()),
            };
            let tuned = match measured {
                Ok(tuned) => tuned,
                Err(why) => {
                    tracing::warn!("{name}: nothing is tuned, what is best by count is taken: {why}");
                    return Ok((device, Tiles::Gpu(counted)));
                }
            };
            write_cached(&device, trial, &tuned);
            device.save_pipeline_cache();
            tuned
        }
    };
    let Tuned { queue, tiles } = tuned;
    tracing::info!("tuned: {queue} queue; {tiles}");
    let device = match policy.queue.is_none() && queue != device.queue_kind() {
        true => Device::open(&DevicePolicy { queue: Some(queue), ..policy.clone() })?,
        false => device,
    };
    Ok((device, Tiles::Gpu(tiles)))
}

/// The cached measurement of these matrices, if the device supports its choices.
pub fn read_cached(device: &Device, trial: &Trial) -> Option<Tuned> {
    let tuned: Tuned = serde_json::from_slice(&device.read_cached(&trial.cache_name())?).ok()?;
    let can = device.info().queues.contains(&tuned.queue) && tuned.tiles.fit(device.info());
    can.then_some(tuned)
}

pub fn write_cached(device: &Device, trial: &Trial, tuned: &Tuned) {
    device.write_cached(&trial.cache_name(), &serde_json::to_vec(tuned).expect("plain data"));
}

/// Measures the choices, beginning with `counted`, the best one by count, and with the fewest tokens. `None` if the
/// device has no clock.
pub fn measured(
    device: &Arc<Device>,
    policy: &DevicePolicy,
    counted: GpuTiles,
    trial: &Trial,
) -> Result<Option<Tuned>, GpuError> {
    let spent = Cell::new(Duration::ZERO);
    let is_over = || spent.get() >= trial.budget;
    let (mut tiles, mut left_out) = (counted, Vec::new());
    // For each matrix, the ways that the device refused, or that yielded wrong bits.
    let mut rejected = vec![Vec::new(); trial.matrices.len()];
    let mut bench = spending(&spent, || Bench::new(device, &trial.matrices))?;
    for (class, tokens) in TOKENS.into_iter().enumerate() {
        for (at, rejected) in rejected.iter_mut().enumerate() {
            let kind = bench.products[at].kind;
            // No step computes more rows of logits.
            if kind == ProductKind::Head && tokens > LOGIT_ROWS {
                continue;
            }
            let mut time = |way| {
                let tiles = GpuTiles::COUNTED.with(kind, class, way);
                spending(&spent, || bench.time(at, tiles, tokens))
            };
            let counted = counted.way(kind, class);
            let of = (counted, trial.subgroups, rejected);
            let Some((way, is_complete)) = fastest(tokens, of, &is_over, &mut time)? else { return Ok(None) };
            tiles = tiles.with(kind, class, way);
            if !is_complete {
                left_out.push(format!("{kind} products of {tokens} tokens"));
            }
        }
    }

    let mut queue = device.queue_kind();
    let mut best = if is_over() { None } else { spending(&spent, || bench.seconds(tiles))? };
    drop(bench);
    for kind in device.info().queues.iter().filter(|kind| **kind != device.queue_kind()) {
        if is_over() {
            left_out.push(format!("the {kind} queue"));
            continue;
        }
        let took = spending(&spent, || {
            let other = Device::open(&DevicePolicy { queue: Some(*kind), ..policy.clone() })?;
            Bench::new(&other, &trial.matrices[..1])?.seconds(tiles)
        })?;
        if let (Some(now), Some(then)) = (best, took)
            && then < CLEARLY * now
        {
            (queue, best) = (*kind, took);
        }
    }
    if !left_out.is_empty() {
        tracing::warn!(
            "{}: {} s were too short to measure everything; the best so far stays, or the best by count, for {}",
            device.info().name,
            trial.budget.as_secs(),
            left_out.join(", ")
        );
    }
    Ok(Some(Tuned { queue, tiles }))
}

/// Runs `work`, and adds its duration to `spent`.
fn spending<T>(spent: &Cell<Duration>, work: impl FnOnce() -> T) -> T {
    let (result, took) = timed(work);
    spent.set(spent.get() + took);
    result
}

/// The time of a product in seconds, and the bits of its result. The time is infinite if the device refuses the kernel.
type Timed = (f64, Vec<u32>);

/// The fastest way of a product of `tokens` tokens whose bits are those of lanes, beginning with `counted`, and whether
/// all ways were measured before `is_over`. A way in `rejected` is not measured again and not chosen. `time` is `None`
/// if the device has no timestamps, and so is the result.
fn fastest(
    tokens: usize,
    (counted, subgroups, rejected): (Way, Option<SubgroupTile>, &mut Vec<Way>),
    is_over: &dyn Fn() -> bool,
    time: &mut dyn FnMut(Way) -> Result<Option<Timed>, GpuError>,
) -> Result<Option<(Way, bool)>, GpuError> {
    let counted = if rejected.contains(&counted) { Way::COUNTED } else { counted };
    if is_over() {
        return Ok(Some((counted, false)));
    }
    let Some((by_lanes, expected)) = time(Way::COUNTED)? else { return Ok(None) };
    let mut seconds = |way| -> Result<f64, GpuError> {
        if way == Way::COUNTED {
            return Ok(by_lanes);
        }
        if rejected.contains(&way) {
            return Ok(f64::INFINITY);
        }
        let Some((took, bits)) = time(way)? else { return Ok(f64::INFINITY) };
        let is_wrong = took.is_finite() && bits != expected;
        if is_wrong {
            tracing::warn!("{way} yield wrong bits for {tokens} tokens on this driver: they are not used");
        }
        if is_wrong || took.is_infinite() {
            rejected.push(way);
            return Ok(f64::INFINITY);
        }
        Ok(took)
    };
    let mut best = (counted, seconds(counted)?);
    let mut others = vec![Way::COUNTED];
    if tokens >= SEVERAL_PASSES {
        let activations = ActivationsFrom::ScalarRegisters;
        others.extend([16, 8].map(|columns| Way::Lanes { columns, activations }));
        others.extend(subgroups.map(Way::Subgroups));
    }
    for is_last in [false, true] {
        if let (true, Way::Lanes { columns, .. }) = (is_last, best.0) {
            others = vec![Way::Lanes { columns, activations: ActivationsFrom::SharedMemory }];
        }
        for way in others.drain(..).filter(|way| *way != counted) {
            if is_over() {
                return Ok(Some((best.0, false)));
            }
            let took = seconds(way)?;
            if took < CLEARLY * best.1 {
                best = (way, took);
            }
        }
    }
    Ok(Some((best.0, true)))
}

/// A device with the matrices that a trial multiplies by.
struct Bench {
    rig: Rig,
    products: Vec<Products>,
}

impl Bench {
    fn new(device: &Arc<Device>, matrices: &[(ProductKind, Scheme, [usize; 2])]) -> Result<Bench, GpuError> {
        let mut rig = Rig::new(device)?;
        let products = matrices.iter().map(|(kind, scheme, shape)| rig.products(*kind, *scheme, *shape));
        let products = products.collect::<Result<_, _>>()?;
        Ok(Bench { rig, products })
    }

    /// The geometric mean of the times of the first products, for few tokens and for many.
    fn seconds(&mut self, tiles: GpuTiles) -> Result<Option<f64>, GpuError> {
        let [few, many] = FEW_AND_MANY.map(|tokens| self.time(0, tiles, tokens));
        Ok(few?.zip(many?).map(|((few, _), (many, _))| (few * many).sqrt()))
    }

    /// Times a product of `tokens` tokens. `None` if the device has no timestamps.
    fn time(&mut self, at: usize, tiles: GpuTiles, tokens: usize) -> Result<Option<Timed>, GpuError> {
        let products = &self.products[at];
        let kernels = match self.rig.kernels_of(products, Tiles::Gpu(tiles)) {
            // Otherwise the device refused the products of subgroups.
            Ok(kernels) if kernels.tiles() == Tiles::Gpu(tiles) => kernels,
            Err(why) if !why.is_refusal() || tiles == GpuTiles::COUNTED => return Err(why),
            refused => {
                if let Err(why) = refused {
                    tracing::warn!("a kernel is not measured, and not used: {why}");
                }
                return Ok(Some((f64::INFINITY, Vec::new())));
            }
        };
        let measured = self.rig.time_product(products, &kernels, tokens, RUNS)?;
        Ok(measured.map(|(span, bits)| {
            tracing::debug!(
                "{tiles}: {} products of {tokens} tokens: {:.1} us",
                products.kind,
                span.seconds * 1e6
            );
            (span.seconds, bits)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: Way = Way::Lanes { columns: 32, activations: ActivationsFrom::SharedMemory };
    const HALF: Way = Way::Lanes { columns: 16, activations: ActivationsFrom::ScalarRegisters };

    /// The fastest way of 64 tokens, if these ways take these times and yield these bits, and all others take 1 s. The
    /// time is over after `most` measurements.
    fn of(counted: Way, ways: &[(Way, f64, u32)], most: usize) -> Option<(Way, bool)> {
        let tile = SubgroupTile::emulated([16, 16, 16]);
        let count = Cell::new(0);
        let mut time = |way| {
            count.set(count.get() + 1);
            let found = ways.iter().find(|(of, ..)| *of == way);
            Ok(Some(found.map_or((1.0, vec![7]), |(_, took, bits)| (*took, vec![*bits]))))
        };
        fastest(64, (counted, tile, &mut Vec::new()), &|| count.get() >= most, &mut time).unwrap()
    }

    #[test]
    fn a_way_is_chosen_if_it_is_clearly_faster() {
        let tile = Way::Subgroups(SubgroupTile::emulated([16, 16, 16]).unwrap());
        assert_eq!(of(Way::COUNTED, &[(tile, 0.9, 7)], 99), Some((tile, true)));
        assert_eq!(of(Way::COUNTED, &[(tile, 0.96, 7)], 99), Some((Way::COUNTED, true)));
        assert_eq!(of(tile, &[(tile, 1.04, 7)], 99), Some((tile, true)));
        assert_eq!(of(tile, &[(tile, 1.1, 7)], 99), Some((Way::COUNTED, true)));
        // The source of activations is compared for the best number of columns.
        let both = Way::Lanes { columns: 16, activations: ActivationsFrom::SharedMemory };
        assert_eq!(of(Way::COUNTED, &[(SHARED, 0.1, 7)], 99), Some((SHARED, true)));
        assert_eq!(
            of(Way::COUNTED, &[(HALF, 0.5, 7), (SHARED, 0.1, 7), (both, 0.4, 7)], 99),
            Some((both, true))
        );
    }

    #[test]
    fn a_way_that_yields_wrong_bits_or_is_refused_is_not_chosen() {
        let tile = Way::Subgroups(SubgroupTile::emulated([16, 16, 16]).unwrap());
        for counted in [Way::COUNTED, tile] {
            assert_eq!(of(counted, &[(tile, 0.1, 8)], 99), Some((Way::COUNTED, true)));
            assert_eq!(of(counted, &[(tile, f64::INFINITY, 0)], 99), Some((Way::COUNTED, true)));
        }
        assert_eq!(of(Way::COUNTED, &[(tile, 0.1, 8), (HALF, 0.5, 7)], 99), Some((HALF, true)));
    }

    #[test]
    fn a_rejected_way_is_not_chosen_for_more_tokens() {
        let tile = SubgroupTile::emulated([16, 16, 16]);
        let (way, mut rejected, measured) = (Way::Subgroups(tile.unwrap()), Vec::new(), Cell::new(0));
        let mut time = |timed| {
            let is_wrong = timed == way;
            measured.set(measured.get() + u32::from(is_wrong));
            Ok(Some((1.0, vec![u32::from(is_wrong)])))
        };
        for is_over in [false, false, true] {
            let found = fastest(64, (way, tile, &mut rejected), &|| is_over, &mut time).unwrap();
            assert_eq!(found, Some((Way::COUNTED, !is_over)));
        }
        assert_eq!(measured.get(), 1);
    }

    #[test]
    fn what_is_not_measured_in_time_is_not_chosen() {
        let tile = Way::Subgroups(SubgroupTile::emulated([16, 16, 16]).unwrap());
        let ways = [(HALF, 0.5, 7), (tile, 0.1, 7)];
        assert_eq!(of(tile, &ways, 0), Some((tile, false)));
        assert_eq!(of(Way::COUNTED, &ways, 0), Some((Way::COUNTED, false)));
        assert_eq!(of(Way::COUNTED, &ways, 1), Some((Way::COUNTED, false)));
        assert_eq!(of(Way::COUNTED, &ways, 2), Some((HALF, false)));
        assert_eq!(of(Way::COUNTED, &ways, 4), Some((tile, true)));
    }
}
