//! The shaders on the compiler of the GPU that this project is for: RADV, asked for a Radeon 780M that is not there.
//!
//! RADV chooses its GPU by a variable of the environment, and a process loads its drivers once: so the suite runs this
//! test again as a process of its own, which prints a line for each pipeline.

use std::path::Path;
use std::process::Command;

use unicorn::gpu::compiler::{Compiled, Compiler};
use unicorn::kernels::all_pipelines;

use crate::support::skip;

const CHILD: &str = "UNICORN_TEST_TARGET_CHILD";
const ICDS: [&str; 2] =
    ["/usr/share/vulkan/icd.d/radeon_icd.json", "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"];

#[test]
fn every_pipeline_fits_the_registers_of_a_radeon_780m() {
    if std::env::var_os(CHILD).is_some() {
        return check();
    }
    let Some(icd) = ICDS.into_iter().find(|icd| Path::new(icd).exists()) else { return skip("radv") };
    let name = "target::every_pipeline_fits_the_registers_of_a_radeon_780m";
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .env("VK_DRIVER_FILES", icd)
        .env("VK_ICD_FILENAMES", icd)
        .env("RADV_FORCE_FAMILY", "phoenix")
        // What is on the disk was compiled without its statistics.
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .output()
        .expect("the suite runs");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("pipelines compiled"), "see above");
}

fn check() {
    let compiler = Compiler::open("PHOENIX").unwrap();
    println!("{}, {}", compiler.info.name, compiler.info.driver);
    println!("pipeline: VGPRs, SGPRs, waves/SIMD, LDS bytes, code bytes; 128-bit loads, VALU, scalar loads");
    // The 27B's heads: 2 query heads per KV head, of 128.
    let pipelines = all_pipelines(2, 128);
    for (shader, constants) in &pipelines {
        let compiled = compiler.compile(shader, constants).unwrap();
        let number = |name: &str| {
            compiled.statistic(name).unwrap_or_else(|| panic!("{name}: {:?}", compiled.statistics))
        };
        println!(
            "{}: {}, {}, {}, {}, {}; {}, {}, {}",
            compiled.name,
            number("VGPRs"),
            number("SGPRs"),
            number("Subgroups per SIMD"),
            number("LDS size"),
            number("Code size"),
            wide_loads(&compiled),
            compiled.instructions("v_"),
            compiled.instructions("s_load") + compiled.instructions("s_buffer_load"),
        );
        assert_eq!(number("Spilled VGPRs") + number("Spilled SGPRs"), 0, "{}: spills", compiled.name);
        assert_eq!(number("Scratch size"), 0, "{}: scratch memory", compiled.name);
        if shader.name.starts_with("matmul") {
            assert!(number("Subgroups per SIMD") >= 8, "{}: too few waves to hide memory", compiled.name);
            // Weights lie so that a lane reads 16 bytes at once: `src/tensor/layout.rs` is frozen on this.
            assert!(wide_loads(&compiled) > 0, "{}: weights are not read 16 bytes at a time", compiled.name);
        }
    }
    println!("{} pipelines compiled", pipelines.len());
}

fn wide_loads(compiled: &Compiled) -> usize {
    compiled.instructions("global_load_b128") + compiled.instructions("buffer_load_b128")
}
