//! Judges kernels for a GPU that is not present: compiles every pipeline, records what a step dispatches ([`work`]),
//! and predicts its time ([`predict`]).
//!
//! RADV chooses its GPU by the environment, and a process loads its drivers once. So one process compiles
//! ([`compile`]), and another reads the result ([`Judge::read`]); `unicorn-lab isa` is both. Nothing is executed.

pub mod predict;
pub mod work;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::assembly::{IsaError, Program, real_waves};
use super::cost::{self, Body};
use crate::gpu::compiler::Compiler;
use crate::gpu::{GpuError, Shader};
use crate::kernels::{Heads, LayerKind, all_pipelines, shaders};
use crate::model::spec::{AttentionHeads, Shape};
use crate::tensor::Precision;

/// A pipeline to compile: its shader, and the values of its constants.
pub type Wanted = (&'static Shader, Vec<u32>);

/// A [`Wanted`] with its shader's name, which can be sent to the compiling process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Named {
    shader: String,
    constants: Vec<u32>,
}

/// The output of the compiling process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Compilation {
    pub device: String,
    pub driver: String,
    pipelines: Vec<Text>,
}

/// One pipeline as the driver reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Text {
    #[serde(flatten)]
    of: Named,
    subgroup_size: u32,
    statistics: Vec<(String, u64)>,
    assembly: String,
}

/// Pipelines cannot be compiled, or the output of a compiler process cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("{name}: {error}")]
    Assembly { name: String, error: IsaError },
    #[error(
        "it compiled {got:?}, where {expected:?} was expected: is it of another version of this program?"
    )]
    Other { got: String, expected: String },
    #[error("there is no kernel {0}: is the process that asks of another version of this program?")]
    Unknown(String),
    #[error("there is no pipeline to compile")]
    Nothing,
}

/// All pipelines of one compiler.
#[derive(Debug, Clone)]
pub struct Judge {
    /// The compiler's name, e.g. `RADV's null device`.
    pub compiler: &'static str,
    pub device: String,
    pub driver: String,
    pub pipelines: Vec<Pipeline>,
}

#[derive(Debug, Clone)]
pub struct Pipeline {
    pub shader: &'static Shader,
    pub constants: Vec<u32>,
    pub subgroup_size: u32,
    statistics: Vec<(String, u64)>,
    pub program: Program,
    /// The pipeline's steady loop; `None` if it has no loop.
    pub body: Option<Body>,
    pub assembly: String,
}

/// Every pipeline that models of these sizes may use, with any types and as any tuner chooses. Each is there once.
pub fn pipelines(shapes: &[Shape]) -> Vec<Wanted> {
    let mut kinds: Vec<(LayerKind, u32, u32)> = Vec::new();
    for shape in shapes {
        let spec = shape.spec();
        let of_heads =
            |heads: AttentionHeads| (spec.layer_kind(), heads.group() as u32, heads.head_dim as u32);
        kinds.extend(spec.distinct_heads().into_iter().map(of_heads));
        if let Some(tower) = shape.tower() {
            kinds.extend(Precision::ALL.into_iter().filter_map(|precision| {
                let request = work::tower_request(&tower, precision);
                let Heads { group, head_dim, .. } = request.heads()?;
                Some((request.layer_kind(), group as u32, head_dim as u32))
            }));
        }
    }
    each_once(kinds.into_iter().flat_map(|(layers, group, head_dim)| all_pipelines(layers, group, head_dim)))
}

/// These pipelines without repetitions, in the order of their names.
fn each_once(pipelines: impl IntoIterator<Item = Wanted>) -> Vec<Wanted> {
    let mut all: Vec<Wanted> = pipelines.into_iter().collect();
    all.sort_by(|(a, x), (b, y)| (a.name, x).cmp(&(b.name, y)));
    all.dedup_by(|(a, x), (b, y)| (a.name, x) == (b.name, y));
    all
}

/// The most pipelines of one process. The shim under RADV 26 does not free the memory of a device, and crashes after about
/// a thousand.
const PIPELINES_PER_PROCESS: usize = 400;

/// The lists that the compiling processes receive: one for each process.
pub fn requests(wanted: &[Wanted]) -> impl Iterator<Item = Vec<Named>> {
    wanted.chunks(PIPELINES_PER_PROCESS).map(|some| some.iter().map(Named::of).collect())
}

/// Compiles pipelines on the device that the environment shows. The device's name contains `device`.
pub fn compile(device: &str, all: &[Named]) -> Result<Compilation, JudgeError> {
    // The shim under RADV 26 crashes after some 400 pipelines of one device.
    const PIPELINES_PER_DEVICE: usize = 40;
    let compile_some = |some: &[Named]| {
        let compiler = Compiler::open(device)?;
        let text = |of: &Named| {
            let shader = shaders::ALL.iter().find(|shader| shader.name == of.shader);
            let shader = shader.ok_or_else(|| JudgeError::Unknown(of.shader.clone()))?;
            let compiled = compiler.compile(shader, &of.constants)?;
            Ok(Text {
                of: of.clone(),
                subgroup_size: compiled.subgroup_size,
                statistics: compiled.statistics,
                assembly: compiled.assembly,
            })
        };
        let texts = some.iter().map(text).collect::<Result<Vec<_>, JudgeError>>()?;
        Ok((compiler.info.name.clone(), compiler.info.driver.clone(), texts))
    };
    let compiled = all.par_chunks(PIPELINES_PER_DEVICE).map(compile_some);
    let compiled = compiled.collect::<Result<Vec<_>, JudgeError>>()?;
    let (device, driver, _) = compiled.first().ok_or(JudgeError::Nothing)?;
    let (device, driver) = (device.clone(), driver.clone());
    let pipelines = compiled.into_iter().flat_map(|(_, _, texts)| texts).collect();
    Ok(Compilation { device, driver, pipelines })
}

impl Named {
    fn of((shader, constants): &Wanted) -> Named {
        Named { shader: shader.name.to_owned(), constants: constants.clone() }
    }
}

impl Compilation {
    /// Adds the next part, which the same compiler made.
    pub fn add(&mut self, next: Compilation) {
        self.pipelines.extend(next.pipelines);
    }
}

impl Judge {
    /// Reads the output of other processes of this program, which compiled these pipelines.
    pub fn read(
        compiler: &'static str,
        compilation: Compilation,
        wanted: &[Wanted],
    ) -> Result<Judge, JudgeError> {
        let Compilation { device, driver, pipelines: texts } = compilation;
        let names = |text: Option<&Text>| {
            text.map_or("nothing".into(), |text| pipeline_name(&text.of.shader, &text.of.constants))
        };
        if texts.len() > wanted.len() {
            let got = names(texts.get(wanted.len()));
            return Err(JudgeError::Other { got, expected: "nothing".into() });
        }
        let mut texts = texts.into_iter();
        let mut all = Vec::with_capacity(wanted.len());
        for pipeline in wanted {
            let (shader, constants) = (pipeline.0, pipeline.1.clone());
            let name = pipeline_name(shader.name, &constants);
            let Some(text) = texts.next().filter(|text| text.of == Named::of(pipeline)) else {
                return Err(JudgeError::Other { got: names(texts.as_slice().first()), expected: name });
            };
            let Text { subgroup_size, statistics, assembly, .. } = text;
            let program = Program::parse(&assembly).map_err(|error| JudgeError::Assembly { name, error })?;
            let body = cost::body(shader, &constants, &program);
            all.push(Pipeline { shader, constants, subgroup_size, statistics, program, body, assembly });
        }
        Ok(Judge { compiler, device, driver, pipelines: all })
    }
}

/// The name of a pipeline in a table: its shader, and the values of its constants.
pub fn pipeline_name(shader: &str, constants: &[u32]) -> String {
    let values: Vec<String> = constants.iter().map(u32::to_string).collect();
    format!("{shader} {}", values.join("x")).trim_end().to_owned()
}

impl Pipeline {
    pub fn name(&self) -> String {
        pipeline_name(self.shader.name, &self.constants)
    }

    /// A statistic of the driver; 0 if the driver reports none of that name.
    pub fn statistic(&self, name: &str) -> u64 {
        self.statistics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value)
    }

    /// Number of waves of 32 lanes that a SIMD holds at the same time, as the driver counts them: a wave of 64 counts
    /// as two.
    pub fn wave32_per_simd(&self) -> u64 {
        self.statistic("Subgroups per SIMD")
    }

    /// Number of waves of the pipeline's own size that a SIMD holds at the same time.
    pub fn waves_per_simd(&self) -> u64 {
        real_waves(self.wave32_per_simd(), self.subgroup_size)
    }

    pub fn spills(&self) -> u64 {
        self.statistic("Spilled VGPRs") + self.statistic("Spilled SGPRs")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch;

    fn wanted() -> Vec<Wanted> {
        pipelines(&arch::shapes().collect::<Vec<_>>())
    }

    fn compiled() -> Compilation {
        let text = |wanted: &Wanted| Text {
            of: Named::of(wanted),
            subgroup_size: 64,
            statistics: vec![("Subgroups per SIMD".into(), 20), ("Spilled VGPRs".into(), 1)],
            assembly: "BB1:\n\tv_fma_f32 v1, v2, v3, v4\n\ts_cbranch_scc1 BB1\n".into(),
        };
        Compilation { device: "d".into(), driver: "v".into(), pipelines: wanted().iter().map(text).collect() }
    }

    #[test]
    fn what_another_process_compiled_is_read() {
        let judge = Judge::read("c", compiled(), &wanted()).unwrap();
        let pipeline = &judge.pipelines[0];
        assert_eq!((pipeline.wave32_per_simd(), pipeline.waves_per_simd(), pipeline.spills()), (20, 10, 1));
        let heads = |name: &str| judge.pipelines.iter().any(|p| p.name() == name);
        assert!(
            heads("attention_f16 4x256x4")
                && heads("attention_f16 2x256x2")
                && heads("attention_f16 2x128x2")
        );
    }

    #[test]
    fn what_another_version_compiled_is_refused() {
        let mut fewer = compiled();
        fewer.pipelines.pop();
        assert!(Judge::read("c", fewer, &wanted()).unwrap_err().to_string().contains("\"nothing\", where"));
        let mut more = compiled();
        more.pipelines.push(more.pipelines[0].clone());
        assert!(Judge::read("c", more, &wanted()).unwrap_err().to_string().contains("where \"nothing\""));
        let mut other = compiled();
        other.pipelines[3].of.constants.push(7);
        assert!(Judge::read("c", other, &wanted()).unwrap_err().to_string().contains("was expected"));
        let mut empty = compiled();
        empty.pipelines[3].assembly.clear();
        assert!(Judge::read("c", empty, &wanted()).unwrap_err().to_string().contains("no instructions"));
    }

    #[test]
    fn a_pipeline_is_named_by_its_shader_and_its_constants() {
        assert_eq!(pipeline_name("matmul_int4", &[8, 4]), "matmul_int4 8x4");
        assert_eq!(pipeline_name("quantize", &[]), "quantize");
    }
}
