//! Measures which of several choices is fastest on a device, once for each driver and version of the shaders. All
//! choices give the same bits.
//!
//! The choices are: the source of the activations of products, the tiles for products of many tokens, and the kind of
//! queue. The choice that is best by count ([`Tiles::of`]) stays unless another one is faster by more than
//! the variation of measurements. A CPU device has no choices.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::rig::{Products, Rig, Span};
use crate::gpu::{Device, DevicePolicy, GpuError, QueueKind};
use crate::kernels::{ActivationsFrom, GpuTiles, SubgroupTile, Tiles};
use crate::tensor::Scheme;

/// The cached file's name.
const CACHE_NAME: &str = "tuning";
/// A choice is better if it takes less than this share of the time.
const CLEARLY: f64 = 0.95;
/// Number of measurements of each choice; the median counts.
const RUNS: usize = 3;

/// The matrix and the numbers of tokens with which products are measured.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    pub scheme: Scheme,
    /// Rows and columns of the matrix.
    pub shape: [usize; 2],
    /// Numbers of tokens of batches and of prompts, for which the choices for many tokens are compared.
    pub many_tokens: [usize; 4],
}

impl Trial {
    /// The gate matrix of a 4B, in the scheme that most checkpoints have.
    const USUAL: Trial =
        Trial { scheme: Scheme::int4(32), shape: [10240, 2560], many_tokens: [16, 32, 64, 256] };
}

/// The fastest choices of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    pub queue: QueueKind,
    pub tiles: GpuTiles,
}

/// The device on its fastest queue, and its tiles, from the cached measurement or from a new one.
pub fn tuned(device: Arc<Device>, policy: &DevicePolicy) -> Result<(Arc<Device>, Tiles), GpuError> {
    let Tiles::Gpu(counted) = Tiles::of(&device) else { return Ok((device, Tiles::Cpu)) };
    let tuned = match read_cached(&device) {
        Some(tuned) => tuned,
        None => {
            tracing::info!("measuring what {} does best (once; --no-tune leaves it out)", device.info().name);
            let measured = match measured(&device, policy, counted, &Trial::USUAL) {
                Ok(Some(tuned)) => Ok(tuned),
                Ok(None) => Err("its queue has no clock".to_owned()),
                Err(error) if device.is_lost() => return Err(error),
                Err(error) => Err(error.to_string()),
            };
            let tuned = match measured {
                Ok(tuned) => tuned,
                Err(why) => {
                    tracing::warn!(
                        "{}: nothing is tuned, what is best by count is taken: {why}",
                        device.info().name
                    );
                    return Ok((device, Tiles::Gpu(counted)));
                }
            };
            write_cached(&device, &tuned);
            device.save_pipeline_cache();
            tuned
        }
    };
    let Tuned { queue, tiles } = tuned;
    let shared = tiles.activations.iter().filter(|from| **from == ActivationsFrom::SharedMemory).count();
    tracing::info!(
        "tuned: {queue} queue, products of up to {} tokens by lanes ({shared} of {} widths from shared memory), of more {}",
        tiles.lane_tokens,
        tiles.activations.len(),
        if tiles.subgroups.is_some() { "by subgroups" } else { "in several passes" }
    );
    let device = match policy.queue.is_none() && queue != device.queue_kind() {
        true => Device::open(&DevicePolicy { queue: Some(queue), ..policy.clone() })?,
        false => device,
    };
    Ok((device, Tiles::Gpu(tiles)))
}

/// The cached measurement, if the device supports its choices.
pub fn read_cached(device: &Device) -> Option<Tuned> {
    let tuned: Tuned = serde_json::from_slice(&device.read_cached(CACHE_NAME)?).ok()?;
    let can = device.info().queues.contains(&tuned.queue)
        && tuned.tiles.subgroups.is_none_or(|tile| SubgroupTile::of(device.info()) == Some(tile))
        && tuned.tiles.is_one();
    can.then_some(tuned)
}

pub fn write_cached(device: &Device, tuned: &Tuned) {
    device.write_cached(CACHE_NAME, &serde_json::to_vec(tuned).expect("plain data"));
}

/// Measures all choices, beginning with `counted`, the best one by count. `None` if the device has no clock.
pub fn measured(
    device: &Arc<Device>,
    policy: &DevicePolicy,
    counted: GpuTiles,
    trial: &Trial,
) -> Result<Option<Tuned>, GpuError> {
    let mut bench = Bench::new(device, trial)?;
    let mut tiles = counted;
    for (i, columns) in GpuTiles::widths().into_iter().enumerate() {
        let mut shared = tiles;
        shared.activations[i] = ActivationsFrom::SharedMemory;
        let columns = [columns as usize];
        let (Some(now), Some(then)) = (bench.seconds(tiles, &columns)?, bench.seconds(shared, &columns)?)
        else {
            return Ok(None);
        };
        if then < CLEARLY * now {
            tiles = shared;
        }
    }

    let mut best = bench.seconds(tiles, &trial.many_tokens)?;
    for subgroups in [None, SubgroupTile::of(device.info())] {
        for lane_tokens in [32, 16, 8] {
            let other = GpuTiles { lane_tokens, subgroups, ..tiles };
            let took = if other == tiles { None } else { bench.seconds(other, &trial.many_tokens)? };
            if let (Some(now), Some(then)) = (best, took)
                && then < CLEARLY * now
            {
                (tiles, best) = (other, took);
            }
        }
    }

    let mut queue = device.queue_kind();
    let few_and_many = [1, trial.many_tokens[1]];
    let mut best = bench.seconds(tiles, &few_and_many)?;
    drop(bench);
    for kind in device.info().queues.iter().filter(|kind| **kind != device.queue_kind()) {
        let other = Device::open(&DevicePolicy { queue: Some(*kind), ..policy.clone() })?;
        let took = Bench::new(&other, trial)?.seconds(tiles, &few_and_many)?;
        if let (Some(now), Some(then)) = (best, took)
            && then < CLEARLY * now
        {
            (queue, best) = (*kind, took);
        }
    }
    Ok(Some(Tuned { queue, tiles }))
}

/// A device with the matrices that a trial multiplies by.
struct Bench {
    rig: Rig,
    products: Products,
    /// The results of the kernel by lanes, by number of tokens.
    yields: BTreeMap<usize, Vec<u32>>,
}

impl Bench {
    fn new(device: &Arc<Device>, trial: &Trial) -> Result<Bench, GpuError> {
        let mut rig = Rig::new(device)?;
        let products = rig.products(trial.scheme, trial.shape)?;
        Ok(Bench { rig, products, yields: BTreeMap::new() })
    }

    /// The geometric mean of the times of products of these numbers of tokens. It is infinite if the bits differ from
    /// those of the kernel by lanes. `None` if the device has no timestamps.
    fn seconds(&mut self, tiles: GpuTiles, tokens: &[usize]) -> Result<Option<f64>, GpuError> {
        let mut logarithms = 0.0;
        for &tokens in tokens {
            let Some((span, bits)) = self.time(tiles, tokens)? else { return Ok(None) };
            if !self.yields.contains_key(&tokens) {
                let by_lanes = self.time(GpuTiles::COUNTED, tokens)?.map(|(_, bits)| bits);
                self.yields.extend(by_lanes.map(|bits| (tokens, bits)));
            }
            if self.yields.get(&tokens) != Some(&bits) {
                tracing::warn!(
                    "{tiles:?} yields wrong bits for {tokens} tokens on this driver: it is not used"
                );
                return Ok(Some(f64::INFINITY));
            }
            tracing::debug!("{tiles:?}, {tokens} tokens: {:.1} us", span.seconds * 1e6);
            logarithms += span.seconds.ln();
        }
        Ok(Some((logarithms / tokens.len() as f64).exp()))
    }

    fn time(&mut self, tiles: GpuTiles, tokens: usize) -> Result<Option<(Span, Vec<u32>)>, GpuError> {
        self.rig.time_product(&self.products, Tiles::Gpu(tiles), tokens, RUNS)
    }
}
