//! `unicorn device-process`: the child process of a server that uses the GPU ([`device::run`]).

use std::time::Instant;

use tracing_subscriber::EnvFilter;

use super::error::Error;
use super::load::{self, OnDevice, Source, Watch};
use super::log::Level;
use super::process::outlive_signals;
use crate::device::{self, DeviceReport, LoadTask, LoadedModel, Loading, OnProgress, Refusal, SelfTested};
use crate::model::draft::Draft;
use crate::model::model_runner::ModelRunner;
use crate::npu;

pub fn device_process(level: Level) -> Result<(), Error> {
    // A service manager may signal all processes of the service. The server decides when this process ends.
    let _runtime = outlive_signals()?;
    let load = |task: LoadTask, report: OnProgress<'_>| {
        load(task, report)
            .map_err(|error| Refusal { message: error.to_string(), exit_code: error.exit_code() })
    };
    match device::run(load::DEMO, load, move |filter| level.set(EnvFilter::new(filter))) {
        // The server has ended, so there is no receiver for a report.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended.map_err(Error::Channel),
    }
}

/// Loads the model and its draft, and runs the self-test, whose failure is an error.
fn load(task: LoadTask, report: OnProgress<'_>) -> Result<LoadedModel, Error> {
    let LoadTask { config, model, draft, vocab_size, npu } = task;
    let watch = if config.gpu.profile { Watch::Kernels } else { Watch::Nothing };
    let source = Source::open(&model)?;
    let draft = draft.as_ref().map(Source::open).transpose()?;
    let OnDevice { runner: mut model, mut draft, npu, kv, usable_bytes } =
        load::on_device(&source, draft.as_ref(), Some(vocab_size), &config, watch, npu.as_ref(), report)?;
    report(Loading::SelfTest, Some(model.device()));
    let self_test = self_test(&mut model, draft.as_mut())?;
    let device = model.device().clone();
    let report = DeviceReport::new(&model, draft.as_ref(), kv, self_test, npu.clone(), usable_bytes);
    let npu = npu.map(|start| npu::cli::reader(start, &model));
    Ok(LoadedModel { runner: load::runner_of(model, draft), device, report, npu })
}

fn self_test(model: &mut ModelRunner, draft: Option<&mut Draft>) -> Result<SelfTested, Error> {
    let since = Instant::now();
    let own = model.self_test()?;
    let of_draft = draft.map(Draft::self_test).transpose()?;
    let of_both = || std::iter::once(&own).chain(&of_draft);
    let layers: Vec<usize> = of_both().filter_map(|tested| tested.layers.ok()).collect();
    let tested = SelfTested {
        kernels: of_both().map(|tested| tested.kernels).sum(),
        layers: (!layers.is_empty()).then(|| layers.iter().sum()),
        seconds: since.elapsed().as_secs_f64(),
    };
    let compared = match (own.layers, tested.layers) {
        (Ok(_), Some(layers)) => format!(" and {layers} layers in {:.2} s", tested.seconds),
        (Err(why), _) => format!(" in {:.2} s; {why}", tested.seconds),
        (Ok(_), None) => unreachable!("the model's own layers were counted"),
    };
    tracing::info!("self-test {} kernels{compared}", tested.kernels);
    for kernel in of_both().flat_map(|tested| &tested.untested) {
        tracing::warn!(
            "the self-test has no expected results for {kernel}: this kernel was not tested on the device"
        );
    }
    Ok(tested)
}
