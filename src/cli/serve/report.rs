//! Combines the report of the device process with what this process knows, for `/status` and `/metrics`.

use std::sync::{Arc, Mutex};

use rustix::process::{Resource, getrlimit};

use super::courtesy::CourtesyWatch;
use crate::cli::energy::Meter;
use crate::device::{DeviceReport, Observer, open_files, processor_time, resident_bytes};
use crate::engine::EnergyCounter as _;
use crate::library::{EnergyReport, LiveReport, ModelReport};
use crate::npu::account::{self, NpuAccount};

pub fn collect(
    device: DeviceReport,
    observer: &Observer,
    courtesy: &CourtesyWatch,
    meter: Option<Arc<Meter>>,
) -> ModelReport {
    let (observer, courtesy) = (observer.clone(), courtesy.clone());
    let npu = Mutex::new(NpuAccount::default());
    let live = move || {
        let courtesy = courtesy.now();
        let device = observer.observe();
        let own = resident_bytes().0;
        let energy =
            |meter: &Arc<Meter>| Some(EnergyReport { source: meter.source(), joules: meter.counted()? });
        let npu = npu.lock().expect("nothing panics under this lock").total(device.as_ref());
        LiveReport {
            // The sum of the server process and the device process.
            resident: device.as_ref().map_or(own, |device| Some(own? + device.resident?)),
            processor: processor_time(),
            open_files: open_files(),
            most_files: getrlimit(Resource::Nofile).current,
            courtesy,
            energy: meter.as_ref().and_then(energy),
            metrics: account::metrics(npu.as_ref()),
            npu,
            device,
        }
    };
    ModelReport { device, live: Box::new(live) }
}
