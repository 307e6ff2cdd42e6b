//! Compute pipelines, made once per shader and set of constants, and their cache on disk.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ash::vk;
use sha2::{Digest, Sha256};

use super::{Buffer, Device, DeviceInfo, GpuError, Need};

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
    file: Option<PathBuf>,
}

impl Pipelines {
    /// `driver_key` names device, driver version and driver build; the file name adds the shaders' hash.
    pub fn new(raw: &ash::Device, driver_key: String) -> Result<Pipelines, GpuError> {
        let file = cache_dir().map(|d| d.join(format!("pipelines-{driver_key}-{}.bin", env!("SHADER_HASH"))));
        let saved = file.as_deref().and_then(read_cache).unwrap_or_default();
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
        Ok(Pipelines { layout, cache, made: Mutex::default(), file })
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

    /// Writes the pipeline cache for the next start. A cache that cannot be written costs time, not answers:
    /// it is logged and left.
    pub fn save_pipeline_cache(&self) {
        let Some(file) = &self.pipelines.file else { return };
        // SAFETY: the cache is this device's.
        let data = unsafe { self.raw.get_pipeline_cache_data(self.pipelines.cache) };
        let written =
            data.map_err(|e| e.to_string()).and_then(|d| write_cache(file, &d).map_err(|e| e.to_string()));
        if let Err(e) = written {
            tracing::warn!("pipeline cache {} not written: {e}", file.display());
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

/// `$UNICORN_CACHE_DIR`, else the user's cache directory, else none.
fn cache_dir() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("UNICORN_CACHE_DIR")
        .or_else(|| Some(var("XDG_CACHE_HOME")?.join("unicorn")))
        .or_else(|| Some(var("HOME")?.join(".cache/unicorn")))
}

/// The cache's bytes, if the file is whole: SHA-256 of the rest, then the rest.
fn read_cache(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (hash, data) = bytes.split_at_checked(32)?;
    (Sha256::digest(data).as_slice() == hash).then(|| data.to_vec())
}

fn write_cache(file: &Path, data: &[u8]) -> std::io::Result<()> {
    let dir = file.parent().expect("the cache file has a directory");
    fs::create_dir_all(dir)?;
    let partial = file.with_extension(format!("tmp{}", std::process::id()));
    fs::write(&partial, [Sha256::digest(data).as_slice(), data].concat())?;
    fs::rename(&partial, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_file_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sub/pipelines.bin");
        assert_eq!(read_cache(&file), None);
        write_cache(&file, b"cache data").unwrap();
        assert_eq!(read_cache(&file).as_deref(), Some(&b"cache data"[..]));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read_cache(&file), None);
        fs::write(&file, b"short").unwrap();
        assert_eq!(read_cache(&file), None);
    }
}
