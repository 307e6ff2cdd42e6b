//! Compiles `shaders/*.comp` to SPIR-V and writes the typed kernel table that `src/kernels` includes.
//!
//! `shaders/variants.toml` lists, per kernel, the `#define`s of each variant. Push-constant structs and
//! specialization constants are read back from the SPIR-V itself, so the Rust side cannot drift from the
//! shader: there is nothing to keep in sync.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

use glslang::include::{IncludeHandler, IncludeResult, IncludeType};
use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SpirvVersion, Target, VulkanVersion,
};
use rspirv::dr::{Module, Operand};
use rspirv::spirv::{Decoration, Op, StorageClass};

/// Kernel name -> variant name -> `#define`s.
type Variants = BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>>;

fn main() {
    let shaders = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("shaders");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", shaders.display());

    let list = shaders.join("variants.toml");
    let text = fs::read_to_string(&list).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    let variants: Variants = toml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", list.display()));

    let mut table = String::new();
    let mut names = Vec::new();
    let mut hash = DefaultHasher::new();
    for (kernel, variants) in &variants {
        let mut push: Option<PushBlock> = None;
        for (variant, defines) in variants {
            let name = if variant == "only" { kernel.clone() } else { format!("{kernel}_{variant}") };
            let words = compile(&shaders, kernel, &name, defines);
            let module = parse(&name, &words);
            let block = PushBlock::of(&name, &module);
            match &push {
                None => push = Some(block),
                Some(first) => {
                    assert!(*first == block, "{name}: its push constants differ from its siblings'")
                }
            }
            emit_shader(&mut table, &name, &words, &module);
            (&name, &words).hash(&mut hash);
            names.push(name.to_uppercase());
        }
        push.unwrap_or_else(|| panic!("{kernel}: no variants")).emit(&mut table, kernel);
    }
    writeln!(table, "/// Every shader of the crate, in alphabetical order.").unwrap();
    let names: Vec<_> = names.iter().map(|n| format!("&{n}")).collect();
    writeln!(table, "pub static ALL: &[&crate::gpu::Shader] = &[{}];", names.join(", ")).unwrap();

    // Names the pipeline cache's file: other shaders, other cache.
    println!("cargo::rustc-env=SHADER_HASH={:016x}", hash.finish());

    let sources = fs::read_dir(&shaders)
        .unwrap()
        .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|x| x == "comp"));
    assert_eq!(sources.count(), variants.len(), "shaders/*.comp and variants.toml name different kernels");
    fs::write(PathBuf::from(env::var("OUT_DIR").unwrap()).join("shaders.rs"), table).unwrap();
}

fn compile(dir: &Path, kernel: &str, name: &str, defines: &BTreeMap<String, String>) -> Vec<u32> {
    let path = dir.join(format!("{kernel}.comp"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let compiler = Compiler::acquire().expect("glslang starts");
    let options = CompilerOptions {
        target: Target::Vulkan { version: VulkanVersion::Vulkan1_3, spirv_version: SpirvVersion::SPIRV1_6 },
        ..CompilerOptions::default()
    };
    let mut include = CommonDir(dir.join("common"));
    let source = ShaderSource::from(text);
    let defines: Vec<(String, Option<String>)> =
        defines.iter().map(|(k, v)| (k.clone(), Some(v.clone()))).collect();
    let defines: Vec<(&str, Option<&str>)> =
        defines.iter().map(|(k, v)| (k.as_str(), v.as_deref())).collect();
    let input = ShaderInput::new(&source, ShaderStage::Compute, &options, Some(&defines), Some(&mut include))
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let shader = compiler.create_shader(input).unwrap_or_else(|e| panic!("{name}: {e}"));
    shader.compile().unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Resolves `#include "x.glsl"` to `shaders/common/x.glsl`.
struct CommonDir(PathBuf);

impl IncludeHandler for CommonDir {
    fn include(&mut self, _: IncludeType, file: &str, _: &str, _: usize) -> Option<IncludeResult> {
        let data = fs::read_to_string(self.0.join(file)).ok()?;
        Some(IncludeResult { name: file.to_string(), data })
    }
}

fn parse(name: &str, words: &[u32]) -> Module {
    let mut loader = rspirv::dr::Loader::new();
    rspirv::binary::parse_words(words, &mut loader).unwrap_or_else(|e| panic!("{name}: {e}"));
    loader.module()
}

/// Members of a shader's push-constant block: name, Rust type, byte offset.
#[derive(PartialEq)]
struct PushBlock {
    members: Vec<(String, &'static str, u32)>,
    bytes: u32,
}

impl PushBlock {
    fn of(name: &str, module: &Module) -> PushBlock {
        let types = &module.types_global_values;
        let find = |id: u32| types.iter().find(|i| i.result_id == Some(id)).expect("type id is defined");
        let Some(variable) = types.iter().find(|i| {
            i.class.opcode == Op::Variable
                && i.operands[0] == Operand::StorageClass(StorageClass::PushConstant)
        }) else {
            panic!("{name}: has no push constants");
        };
        let pointer = find(variable.result_type.unwrap());
        let block = find(pointer.operands[1].unwrap_id_ref());
        let id = block.result_id.unwrap();

        let mut members = Vec::new();
        let mut bytes = 0;
        for (index, member) in block.operands.iter().enumerate() {
            let index = index as u32;
            let rust = match find(member.unwrap_id_ref()) {
                t if t.class.opcode == Op::TypePointer => "u64",
                t if t.class.opcode == Op::TypeFloat => "f32",
                t if t.class.opcode == Op::TypeInt && t.operands[1] == Operand::LiteralBit32(0) => "u32",
                t => panic!(
                    "{name}: push constant {index} has a type without a Rust twin: {:?}",
                    t.class.opcode
                ),
            };
            let field = module.debug_names.iter().find(|i| {
                i.class.opcode == Op::MemberName
                    && i.operands[0] == Operand::IdRef(id)
                    && i.operands[1] == Operand::LiteralBit32(index)
            });
            let field = field.expect("members are named").operands[2].unwrap_literal_string().to_string();
            let offset = module.annotations.iter().find_map(|i| match i.operands.as_slice() {
                [
                    Operand::IdRef(t),
                    Operand::LiteralBit32(m),
                    Operand::Decoration(Decoration::Offset),
                    Operand::LiteralBit32(o),
                ] if *t == id && *m == index => Some(*o),
                _ => None,
            });
            let offset = offset.expect("members have offsets");
            assert_eq!(offset, bytes, "{name}: padding before {field}; order members by size");
            bytes = offset + if rust == "u64" { 8 } else { 4 };
            members.push((field, rust, offset));
        }
        if members.iter().any(|m| m.1 == "u64") && bytes % 8 != 0 {
            bytes += 4;
            members.push(("_pad".to_string(), "u32", bytes - 4));
        }
        assert!(bytes <= 128, "{name}: {bytes} bytes of push constants; 128 is what every device has");
        PushBlock { members, bytes }
    }

    fn emit(&self, out: &mut String, kernel: &str) {
        let camel: String = kernel.split('_').map(|w| w[..1].to_uppercase() + &w[1..]).collect();
        writeln!(out, "/// Push constants of `{kernel}.comp`, generated from its SPIR-V.").unwrap();
        writeln!(
            out,
            "#[repr(C)]\n#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]"
        )
        .unwrap();
        writeln!(out, "pub struct {camel}Push {{").unwrap();
        for (field, rust, _) in &self.members {
            writeln!(out, "    pub {field}: {rust},").unwrap();
        }
        writeln!(out, "}}").unwrap();
        writeln!(out, "const _: () = assert!(size_of::<{camel}Push>() == {});\n", self.bytes).unwrap();
    }
}

fn emit_shader(out: &mut String, name: &str, words: &[u32], module: &Module) {
    let out_dir = PathBuf::from(env::var("OUT_DIR").unwrap());
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    fs::write(out_dir.join(format!("{name}.spv")), bytes).unwrap();

    let mut constants: Vec<(u32, String)> = module
        .annotations
        .iter()
        .filter_map(|i| match i.operands.as_slice() {
            [Operand::IdRef(id), Operand::Decoration(Decoration::SpecId), Operand::LiteralBit32(spec)] => {
                let name = module
                    .debug_names
                    .iter()
                    .find(|n| n.class.opcode == Op::Name && n.operands[0] == Operand::IdRef(*id));
                Some((
                    *spec,
                    name.map_or(String::new(), |n| n.operands[1].unwrap_literal_string().to_string()),
                ))
            }
            _ => None,
        })
        .collect();
    constants.sort();
    let constants: Vec<_> = constants.iter().map(|(id, name)| format!("({id}, {name:?})")).collect();
    writeln!(
        out,
        "pub static {}: crate::gpu::Shader = crate::gpu::Shader {{ name: {name:?}, constants: &[{}], spirv: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.spv\")) }};",
        name.to_uppercase(),
        constants.join(", "),
    )
    .unwrap();
}
