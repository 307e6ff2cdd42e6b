//! Compute pipelines, made once per shader and set of constants.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ash::vk;

use super::cache::Cache;
use super::{Buffer, Device, DeviceInfo, GpuError, Need};

/// What the cache of pipelines is kept as.
const KEPT: &str = "pipelines";

/// Push-constant bytes of every pipeline layout: what Vulkan guarantees.
pub(super) const PUSH_BYTES: u32 = 128;

/// One compiled shader of the kernel table, a variant of a kernel; all of it is read back from its SPIR-V.
#[derive(Debug)]
pub struct Shader {
    pub name: &'static str,
    pub kernel: &'static str,
    /// Specialization constants: (id, name), ascending.
    pub constants: &'static [(u32, &'static str)],
    /// The push constants that are addresses, in order, and what is done with the memory behind each.
    pub pointers: &'static [(&'static str, Access)],
    /// Whether it follows addresses that it finds in memory; it reads there.
    pub follows: bool,
    pub needs: &'static [Need],
    /// Invocations of a workgroup.
    pub workgroup: [u32; 3],
    /// Bytes of shared memory, by the constants.
    pub shared_bytes: fn(&[u32]) -> u32,
    pub spirv: &'static [u8],
}

/// What a shader does with the memory behind an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The variant does not use the address.
    None,
    Read,
    Write,
    ReadWrite,
}

impl Access {
    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::ReadWrite)
    }
}

/// What one dispatch of a kernel takes; `build.rs` generates a struct for each.
pub trait Arguments {
    const KERNEL: &'static str;
    /// The push constants as the shader has them.
    type Push: bytemuck::NoUninit;

    /// The buffers behind the shader's addresses, in the order of [`Shader::pointers`]. `None` is for variants that do not use
    /// them, and for addresses whose names end in `_or_none`.
    fn buffers(&self) -> impl Iterator<Item = Option<&Buffer>>;

    /// The buffers behind the addresses that the shader finds in memory.
    fn followed(&self) -> &[&Buffer];

    fn push(&self) -> Self::Push;
}

pub struct Pipeline {
    pub(super) raw: vk::Pipeline,
    pub(super) name: String,
    pub(super) shader: &'static Shader,
}

type Key = (&'static str, Vec<u32>);

/// All pipelines of a device. They share one layout: push constants only, since buffers go by address.
pub(super) struct Pipelines {
    pub layout: vk::PipelineLayout,
    cache: vk::PipelineCache,
    made: Mutex<HashMap<Key, Arc<Pipeline>>>,
}

impl Pipelines {
    pub fn new(raw: &ash::Device, kept: &Cache) -> Result<Pipelines, GpuError> {
        let saved = kept.read(KEPT).unwrap_or_default();
        let push =
            [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(PUSH_BYTES)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&push);
        // SAFETY: the device is alive.
        let layout = unsafe { raw.create_pipeline_layout(&info, None) }
            .map_err(GpuError::of("vkCreatePipelineLayout"))?;
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&saved);
        // SAFETY: the data's hash was checked, and the driver checks its own header.
        let cache = unsafe { raw.create_pipeline_cache(&info, None) }
            // SAFETY: nothing uses the layout yet.
            .inspect_err(|_| unsafe { raw.destroy_pipeline_layout(layout, None) })
            .map_err(GpuError::of("vkCreatePipelineCache"))?;
        Ok(Pipelines { layout, cache, made: Mutex::default() })
    }

    /// SAFETY (caller): no submitted work uses a pipeline any more.
    pub unsafe fn destroy(&self, raw: &ash::Device) {
        // SAFETY: per this function's contract; each handle is destroyed once.
        unsafe {
            for pipeline in self.made.lock().unwrap().values() {
                raw.destroy_pipeline(pipeline.raw, None);
            }
            raw.destroy_pipeline_layout(self.layout, None);
            raw.destroy_pipeline_cache(self.cache, None);
        }
    }
}

impl Device {
    /// The pipeline of `shader` with `constants` (in the order of `Shader::constants`), made at first use.
    pub fn pipeline(&self, shader: &'static Shader, constants: &[u32]) -> Result<Arc<Pipeline>, GpuError> {
        let key = (shader.name, constants.to_vec());
        // Held while compiling: two threads asking for one pipeline compile it once.
        let mut made = self.pipelines.made.lock().unwrap();
        if let Some(pipeline) = made.get(&key) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(self.compile(shader, constants)?);
        made.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    fn compile(&self, shader: &'static Shader, constants: &[u32]) -> Result<Pipeline, GpuError> {
        let (cache, layout) = (self.pipelines.cache, self.pipelines.layout);
        let flags = vk::PipelineCreateFlags::empty();
        let raw = create_pipeline(&self.raw, self.info(), cache, layout, flags, shader, constants)?;
        let name = pipeline_name(shader, constants);
        self.name(raw, &name);
        Ok(Pipeline { raw, name, shader })
    }

    /// Keeps the pipeline cache for the next start.
    pub fn save_pipeline_cache(&self) {
        // SAFETY: the cache is this device's.
        match unsafe { self.raw.get_pipeline_cache_data(self.pipelines.cache) } {
            Ok(data) => self.cache.write(KEPT, &data),
            Err(e) => tracing::warn!("no pipeline cache is kept: {e}"),
        }
    }
}

/// A shader's name and the values of its constants.
pub(super) fn pipeline_name(shader: &Shader, constants: &[u32]) -> String {
    let named = shader.constants.iter().zip(constants).map(|((_, n), v)| format!(" {n}={v}"));
    format!("{}{}", shader.name, named.collect::<String>())
}

/// Compiles `shader` for the device, or says what that lacks.
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
        return Err(GpuError::Unsupported { name, device: device.name.clone(), missing: missing.join(", ") });
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
    // SAFETY: the SPIR-V comes from glslang at build time; everything pointed to lives across the calls.
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
