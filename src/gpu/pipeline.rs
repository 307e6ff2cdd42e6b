//! Compute pipelines, compiled once per shader and set of constants.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ash::vk;

use super::GpuError;
use super::cache::Cache;
use super::info::DeviceInfo;
use super::shader::Shader;

/// The name of the pipeline cache's file.
const CACHE_NAME: &str = "pipelines";

/// Bytes of push constants in every pipeline layout: the minimum that Vulkan guarantees.
pub(super) const PUSH_BYTES: u32 = 128;

pub struct Pipeline {
    pub(super) raw: vk::Pipeline,
    pub(super) name: String,
    pub(super) shader: &'static Shader,
    pub(super) constants: Vec<u32>,
}

type Key = (&'static str, Vec<u32>);
/// A pipeline, or nothing until it is compiled. It is locked while it is compiled: different pipelines are compiled at the
/// same time, and the same one only once.
type Place = Mutex<Option<Arc<Pipeline>>>;

/// All pipelines of a device. They share one layout with push constants only, because shaders use buffer addresses.
pub(super) struct Pipelines {
    pub layout: vk::PipelineLayout,
    cache: vk::PipelineCache,
    made: Mutex<HashMap<Key, Arc<Place>>>,
}

impl Pipelines {
    pub fn new(raw: &ash::Device, files: &Cache) -> Result<Pipelines, GpuError> {
        let saved = files.read(CACHE_NAME).unwrap_or_default();
        let layout = create_layout(raw)?;
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&saved);
        // SAFETY: the data's hash was checked, and the driver checks the header of its data.
        let cache = unsafe { raw.create_pipeline_cache(&info, None) }
            // SAFETY: nothing uses the layout yet.
            .inspect_err(|_| unsafe { raw.destroy_pipeline_layout(layout, None) })
            .map_err(GpuError::of("vkCreatePipelineCache"))?;
        Ok(Pipelines { layout, cache, made: Mutex::default() })
    }

    /// The pipeline of `shader` with `constants`. At first use it is compiled on the device `raw`, and `on_created` is
    /// called with the pipeline and its name.
    pub fn get(
        &self,
        raw: &ash::Device,
        device: &DeviceInfo,
        shader: &'static Shader,
        constants: &[u32],
        on_created: impl Fn(vk::Pipeline, &str),
    ) -> Result<Arc<Pipeline>, GpuError> {
        let key = (shader.name, constants.to_vec());
        let place = self.made.lock().unwrap().entry(key).or_default().clone();
        let mut made = place.lock().unwrap();
        if let Some(pipeline) = &*made {
            return Ok(pipeline.clone());
        }
        let flags = vk::PipelineCreateFlags::empty();
        let handle = create_pipeline(raw, device, self.cache, self.layout, flags, shader, constants)?;
        let constants = constants.to_vec();
        let pipeline = Pipeline { raw: handle, name: pipeline_name(shader, &constants), shader, constants };
        on_created(handle, &pipeline.name);
        let pipeline = Arc::new(pipeline);
        *made = Some(pipeline.clone());
        Ok(pipeline)
    }

    /// Writes the pipeline cache of the device `raw` to a file for the next start.
    pub fn save(&self, raw: &ash::Device, files: &Cache) {
        // SAFETY: the cache was created on this device, and is destroyed only with the device.
        match unsafe { raw.get_pipeline_cache_data(self.cache) } {
            Ok(data) if data.is_empty() => {}
            Ok(data) => files.write(CACHE_NAME, &data),
            Err(e) => tracing::warn!("cannot save the pipeline cache: {e}"),
        }
    }

    /// # Safety
    ///
    /// No submitted work may use a pipeline any longer.
    pub unsafe fn destroy(&self, raw: &ash::Device) {
        // SAFETY: per this function's contract; each handle is destroyed once.
        unsafe {
            for place in self.made.lock().unwrap().values() {
                if let Some(pipeline) = &*place.lock().unwrap() {
                    raw.destroy_pipeline(pipeline.raw, None);
                }
            }
            raw.destroy_pipeline_layout(self.layout, None);
            raw.destroy_pipeline_cache(self.cache, None);
        }
    }
}

/// The layout of every pipeline.
pub(super) fn create_layout(raw: &ash::Device) -> Result<vk::PipelineLayout, GpuError> {
    let push = [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(PUSH_BYTES)];
    let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&push);
    // SAFETY: the device is alive; the caller destroys the layout.
    unsafe { raw.create_pipeline_layout(&info, None) }.map_err(GpuError::of("vkCreatePipelineLayout"))
}

/// A shader's name and the values of its constants.
pub(super) fn pipeline_name(shader: &Shader, constants: &[u32]) -> String {
    let named = shader.constants.iter().zip(constants).map(|((_, n), v)| format!(" {n}={v}"));
    format!("{}{}", shader.name, named.collect::<String>())
}

/// Compiles `shader` for the device. The error names the features that the device lacks.
pub(super) fn create_pipeline(
    raw: &ash::Device,
    device: &DeviceInfo,
    cache: vk::PipelineCache,
    layout: vk::PipelineLayout,
    flags: vk::PipelineCreateFlags,
    shader: &'static Shader,
    constants: &[u32],
) -> Result<vk::Pipeline, GpuError> {
    assert_eq!(constants.len(), shader.constants.len(), "{}: {:?}", shader.name, shader.constants);
    let (caps, name) = (&device.caps, pipeline_name(shader, constants));
    let missing = caps.missing(shader, constants);
    if !missing.is_empty() {
        let (device, missing) = (&device.name, missing.join(", "));
        return Err(GpuError::Unusable(format!("{name} cannot run on {device}: it lacks {missing}")));
    }
    let words: Vec<u32> =
        shader.spirv.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let entries: Vec<_> = shader
        .constants
        .iter()
        .enumerate()
        .map(|(i, &(id, _))| {
            vk::SpecializationMapEntry::default().constant_id(id).offset(4 * i as u32).size(4)
        })
        .collect();
    let specialization =
        vk::SpecializationInfo::default().map_entries(&entries).data(bytemuck::cast_slice(constants));
    let mut subgroups = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default();
    let mut stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .name(c"main")
        .specialization_info(&specialization);
    if caps.has_full_subgroups(shader.workgroup) {
        stage = stage.flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS);
    }
    if let Some(size) = caps.required_subgroup_size(shader.workgroup) {
        subgroups = subgroups.required_subgroup_size(size);
        stage = stage.push_next(&mut subgroups);
    }
    // SAFETY: glslang compiled the SPIR-V at build time; all pointers are valid during the calls.
    unsafe {
        let module = raw
            .create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&words), None)
            .map_err(GpuError::of("vkCreateShaderModule"))?;
        let info =
            vk::ComputePipelineCreateInfo::default().flags(flags).stage(stage.module(module)).layout(layout);
        let made = raw.create_compute_pipelines(cache, &[info], None);
        raw.destroy_shader_module(module, None);
        Ok(made.map_err(|(_, e)| GpuError::of(&format!("compiling {name}"))(e))?[0])
    }
}
