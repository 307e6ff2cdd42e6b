//! Measures how fast a device reads weights from each of its heaps, once for each driver and version of the shaders.
//!
//! Decoding reads all weights for each token, so the speed of their heap bounds it. On an integrated GPU, the heaps
//! differ if their pages do: GTT consists of pages of the system, and small pages take more lookups. The measurement
//! runs the kernel that decoding runs, the product of one token with int4 matrices. The results decide where
//! `memory.ffn_heap = "auto"` places FFN weights ([`Machine::ffn_choice`]), and the first rates of a model. A load
//! measures no device that is a CPU: it has one heap.

use std::fmt;
use std::sync::Arc;

use super::rig::{ROTATED_BYTES, Rig};
use crate::gpu::placement::{self, Limits, Machine, Request};
use crate::gpu::{Arena, Class, Device, DeviceKind, GpuError, MemoryKind};
use crate::kernels::{Matrices, Matrix, Wants};
use crate::tensor::Scheme;

/// Number of measured spans; the median counts.
const RUNS: usize = 5;

/// What is read in each heap.
#[derive(Debug, Clone, Copy)]
pub struct ReadTest {
    /// Rows and columns of the matrices.
    pub shape: [usize; 2],
    /// Bytes of all matrices in a heap, at most. They take at most half of the heap's free bytes.
    pub most_bytes: u64,
    /// With fewer bytes, a heap is not measured, because caches would hold a part of them.
    pub least_bytes: u64,
}

impl ReadTest {
    /// Gate matrices of a 27B, up to 1 GiB of them.
    const OF_GPUS: ReadTest =
        ReadTest { shape: [21504, 5376], most_bytes: 1 << 30, least_bytes: ROTATED_BYTES };
    /// A CPU takes long for as many bytes. Only `unicorn doctor --heaps` measures it.
    const OF_CPUS: ReadTest = ReadTest { shape: [2048, 4096], most_bytes: 32 << 20, least_bytes: 16 << 20 };
    const SCHEME: Scheme = Scheme::int4(128);

    /// Bytes of a matrix that a product reads.
    fn matrix_bytes(&self) -> u64 {
        let [rows, cols] = self.shape;
        Self::SCHEME.bytes(rows, cols)
    }
}

/// Why no speed is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMeasured {
    NoClock,
    /// The heap with this name has too few free bytes now.
    NoRoom(String),
}

impl fmt::Display for NotMeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotMeasured::NoClock => f.write_str("its queue has no clock"),
            NotMeasured::NoRoom(heap) => {
                write!(f, "{heap} has too little free memory now; a start with more free memory measures it")
            }
        }
    }
}

/// Whether a load has to measure: the device is a GPU, and no speed of its heaps is known.
pub fn is_due(device: &Device) -> bool {
    device.info().kind != DeviceKind::Cpu && device.machine().heaps.iter().all(|heap| heap.read.is_none())
}

/// Measures all heaps, and keeps the speeds with the device, for this start and for later ones.
pub fn measure(device: &Arc<Device>) -> Result<Result<(), NotMeasured>, GpuError> {
    let test = match device.info().kind {
        DeviceKind::Cpu => ReadTest::OF_CPUS,
        _ => ReadTest::OF_GPUS,
    };
    let speeds = match measured(device, &test)? {
        Ok(speeds) => speeds,
        Err(why) => return Ok(Err(why)),
    };
    device.keep_read_speeds(&speeds);
    device.save_pipeline_cache();
    Ok(Ok(()))
}

/// Measures all heaps, as [`measure`] does, before a load. A failure is logged, and no speed is known then, unless the
/// device is lost.
pub fn measure_for_load(device: &Arc<Device>) -> Result<(), GpuError> {
    let name = &device.info().name;
    tracing::info!("measuring how fast {name} reads its memory (once; --no-tune leaves it out)");
    let why = match measure(device) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(why)) => why.to_string(),
        Err(error) if device.is_lost() => return Err(error),
        Err(error) => error.to_string(),
    };
    tracing::warn!("{name}: it is not known how fast it reads its memory: {why}");
    Ok(())
}

/// Reads each heap that weights can be in. Returns bytes per second by heap, in the driver's order; `None` for a heap
/// that weights are never in, or that is smaller than the test.
pub fn measured(
    device: &Arc<Device>,
    test: &ReadTest,
) -> Result<Result<Vec<Option<u64>>, NotMeasured>, GpuError> {
    if device.busy().is_none() {
        return Ok(Err(NotMeasured::NoClock));
    }
    let machine = device.machine();
    let mut speeds = vec![None; device.info().heaps.len()];
    for heap in machine.weight_heaps().into_iter().map(|i| &machine.heaps[i]) {
        if heap.size < 2 * test.least_bytes {
            continue;
        }
        // A machine that has only this heap places all matrices in it.
        let only = Machine { heaps: vec![heap.clone()], ..machine.clone() };
        let count = (heap.free / 2).min(test.most_bytes) / test.matrix_bytes();
        if count * test.matrix_bytes() < test.least_bytes {
            return Ok(Err(NotMeasured::NoRoom(heap.name.clone())));
        }
        let seconds = match seconds(device, &only, test, count) {
            // Another program may have taken the memory in the meantime.
            Err(GpuError::NoRoom(_)) => return Ok(Err(NotMeasured::NoRoom(heap.name.clone()))),
            seconds => seconds?.filter(|seconds| *seconds > 0.0),
        };
        let Some(seconds) = seconds else { return Ok(Err(NotMeasured::NoClock)) };
        let bytes = count * test.matrix_bytes();
        tracing::info!(
            "{}: {bytes} bytes of weights are read at {:.1} GB/s",
            heap.name,
            bytes as f64 / seconds / 1e9
        );
        speeds[heap.index] = Some(((bytes as f64 / seconds) as u64).max(1));
    }
    Ok(Ok(speeds))
}

/// Seconds of the products of one token with each of `count` matrices, which are placed in `machine`. The memory is free
/// again when this returns.
fn seconds(
    device: &Arc<Device>,
    machine: &Machine,
    test: &ReadTest,
    count: u64,
) -> Result<Option<f64>, GpuError> {
    let (scheme, [rows, cols]) = (ReadTest::SCHEME, test.shape);
    let mut rig = Rig::new(device)?;
    let matrices = {
        let mut make = rig.make();
        let sizes = Matrix::buffer_bytes(scheme, rows, cols, make.max_shard_bytes());
        let sizes: Vec<u64> = sizes.flat_map(|(blocks, scales)| [Some(blocks), scales]).flatten().collect();
        let request = |bytes: u64| Request {
            class: Class::Ffn,
            kind: MemoryKind::Device,
            bytes,
            name: "measured".to_owned(),
        };
        let requests = (0..count).flat_map(|_| sizes.iter().copied().map(request)).collect();
        // Half of the free memory is enough for the matrices, so no reserve is needed.
        let limits = Limits { reserve: Some(0), ..Limits::default() };
        let plan = placement::place(machine, &limits, requests)
            .map_err(|refusal| GpuError::NoRoom(refusal.to_string()))?;
        make.arena = Arena::with_plan(device, plan)?;
        make.copies(scheme, rows, cols, count)?
    };
    let kernels = rig.multiplying(&Matrices { products: vec![scheme], ..Matrices::default() })?;
    let mut make = rig.make();
    let (x, y) =
        (make.operand(&kernels, Wants { floats: false, blocks: true }, 1, cols)?, make.activations(1, rows)?);
    let span = rig.time(RUNS, &mut |recorder, _| {
        for matrix in &matrices {
            kernels.matmul(recorder, &[(matrix, &y)], &x, 1);
        }
    })?;
    Ok(span.map(|span| span.seconds))
}
