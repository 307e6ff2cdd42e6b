//! Compiles pipelines for a GPU that is not present, and reads the driver's statistics: registers, spills, assembly.
//!
//! RADV can compile for AMD GPUs that the machine does not have: set `VK_DRIVER_FILES` to RADV's ICD file and
//! `RADV_FORCE_FAMILY` to the GPU family (`phoenix` for the Radeon 780M). The loader then lists a "Null hardware"
//! device. That device has no heaps and creates no timeline semaphore, so [`Device`](super::Device) cannot open it;
//! [`Compiler`] opens it, only to compile.

use ash::{khr, vk};

use super::device::RawDevice;
use super::enumerate::enumerate;
use super::instance::Instance;
use super::pipeline::{create_layout, create_pipeline, pipeline_name};
use super::{DeviceInfo, GpuError, Shader};

/// A device that compiles pipelines, but does not run them.
pub struct Compiler {
    layout: vk::PipelineLayout,
    executables: khr::pipeline_executable_properties::Device,
    pub info: DeviceInfo,
    raw: RawDevice,
    _instance: Instance,
}

/// One compiled pipeline.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Number of lanes of a wave. The driver chooses it if the pipeline requires no size.
    pub subgroup_size: u32,
    /// The driver's statistics with their names, e.g. ("Spilled VGPRs", 0).
    pub statistics: Vec<(String, u64)>,
    pub assembly: String,
}

impl Compiler {
    /// Opens the device whose name contains `part`.
    pub fn open(part: &str) -> Result<Compiler, GpuError> {
        let instance = Instance::new(false)?;
        let candidates = enumerate(&instance)?;
        let seen: Vec<_> = candidates.iter().map(|c| c.info.name.clone()).collect();
        let chosen = candidates.into_iter().find(|c| c.info.name.contains(part)).ok_or_else(|| {
            GpuError::NoDevice(format!("no device name contains {part:?}; found: {}", seen.join("; ")))
        })?;
        let queue_family = chosen.queues.first().map_or(0, |queue| queue.index);
        let raw = chosen.info.caps.create_device(&instance.raw, chosen.raw, queue_family, &[], true)?;
        let raw = RawDevice(raw);
        let layout = create_layout(&raw)?;
        let executables = khr::pipeline_executable_properties::Device::new(&instance.raw, &raw);
        Ok(Compiler { layout, executables, info: chosen.info, raw, _instance: instance })
    }

    /// Compiles `shader` with `constants`, in the order of `Shader::constants`.
    pub fn compile(&self, shader: &'static Shader, constants: &[u32]) -> Result<Compiled, GpuError> {
        let flags = vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
            | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
        let cache = vk::PipelineCache::null();
        let pipeline = create_pipeline(&self.raw, &self.info, cache, self.layout, flags, shader, constants)?;
        let name = pipeline_name(shader, constants);
        let what = format!("statistics of {name}");
        let info = vk::PipelineInfoKHR::default().pipeline(pipeline);
        let executable = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline).executable_index(0);
        // SAFETY: the pipeline was just created with both capture flags, and is destroyed once, below.
        let captured = unsafe {
            let executables = self.executables.get_pipeline_executable_properties(&info);
            let sizes = executables.map(|all| all.iter().map(|e| e.subgroup_size).collect::<Vec<_>>());
            let statistics = self.executables.get_pipeline_executable_statistics(&executable);
            let texts = self.representations(&executable);
            self.raw.destroy_pipeline(pipeline, None);
            statistics.and_then(|s| Ok((sizes?, s, texts?))).map_err(GpuError::of(&what))?
        };
        let value = |s: &vk::PipelineExecutableStatisticKHR| match s.format {
            // SAFETY: the format says which field of the union is set.
            vk::PipelineExecutableStatisticFormatKHR::UINT64 => unsafe { s.value.u64 },
            // SAFETY: as above.
            vk::PipelineExecutableStatisticFormatKHR::INT64 => unsafe { s.value.i64 as u64 },
            _ => 0,
        };
        let text = |name: Result<&std::ffi::CStr, _>| {
            name.map_or(String::new(), |n: &std::ffi::CStr| n.to_string_lossy().into_owned())
        };
        let (sizes, statistics, texts) = captured;
        let [subgroup_size] = sizes[..] else {
            panic!("a compute pipeline has one executable: {sizes:?}");
        };
        Ok(Compiled {
            subgroup_size,
            statistics: statistics.iter().map(|s| (text(s.name_as_c_str()), value(s))).collect(),
            assembly: texts
                .into_iter()
                .find(|(name, _)| name.contains("ssembly"))
                .map_or(String::new(), |t| t.1),
        })
    }

    /// The compiler's internal representations as (name, text).
    ///
    /// # Safety
    ///
    /// The executable's pipeline must be alive, and must have been created with the capture flag.
    unsafe fn representations(
        &self,
        executable: &vk::PipelineExecutableInfoKHR<'_>,
    ) -> Result<Vec<(String, String)>, vk::Result> {
        let call = self.executables.fp().get_pipeline_executable_internal_representations_khr;
        let mut count = 0;
        // SAFETY: per this function's contract. The first call returns the count, the second the lengths, the third the
        // texts.
        unsafe {
            call(self.raw.handle(), executable, &mut count, std::ptr::null_mut()).result()?;
            let mut list = vec![vk::PipelineExecutableInternalRepresentationKHR::default(); count as usize];
            call(self.raw.handle(), executable, &mut count, list.as_mut_ptr()).result()?;
            let mut texts: Vec<Vec<u8>> = list.iter().map(|r| vec![0; r.data_size]).collect();
            for (representation, text) in list.iter_mut().zip(&mut texts) {
                representation.p_data = text.as_mut_ptr().cast();
            }
            call(self.raw.handle(), executable, &mut count, list.as_mut_ptr()).result()?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
            Ok(list
                .iter()
                .zip(&texts)
                .map(|(r, bytes)| {
                    let name = r.name_as_c_str().map_or(String::new(), |n| n.to_string_lossy().into_owned());
                    (name, text(bytes))
                })
                .collect())
        }
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // SAFETY: `compile` destroys its pipelines; the layout is destroyed once.
        unsafe { self.raw.destroy_pipeline_layout(self.layout, None) }
    }
}
