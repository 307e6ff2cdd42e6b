//! Compiles `shaders/*.comp` to SPIR-V and writes the typed kernel table that `src/kernels` includes.
//!
//! `shaders/variants.toml` lists the `#define`s of each variant of each kernel. Everything else is read from the
//! SPIR-V, so that the Rust side always matches the shader: push constants, specialization constants, how a variant
//! accesses the memory of each buffer address (which decides barriers), and the required device features.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

use glslang::include::{IncludeHandler, IncludeResult, IncludeType};
use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SpirvVersion, Target, VulkanVersion,
};
use rspirv::binary::Assemble;
use rspirv::dr::{Instruction, Module, Operand};
use rspirv::spirv::{
    Capability, Decoration, ExecutionMode, MemoryAccess, MemoryModel, MemorySemantics, Op, StorageClass,
};

/// Kernel name -> variant name -> `#define`s.
type Variants = BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>>;

fn main() {
    let shaders = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap()).join("shaders");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", shaders.display());

    let list = shaders.join("variants.toml");
    let text = fs::read_to_string(&list).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    let mut variants: Variants = toml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    variants.values_mut().for_each(combine);

    let mut table = String::new();
    let mut names = Vec::new();
    let mut hash = DefaultHasher::new();
    for (kernel, variants) in &variants {
        let mut push: Option<PushBlock> = None;
        for (variant, defines) in variants {
            let name = if variant == "only" { kernel.clone() } else { format!("{kernel}_{variant}") };
            let mut module = parse(&name, &compile(&shaders, kernel, &name, defines));
            forbid_contraction(&mut module);
            synchronize_at_barriers(&mut module);
            let words = module.assemble();
            let block = PushBlock::of(&name, &module);
            emit_shader(&mut table, kernel, &name, &words, &module, &block);
            match &mut push {
                None => push = Some(block),
                Some(first) => first.join(&name, block),
            }
            (&name, &words).hash(&mut hash);
            names.push(name.to_uppercase());
        }
        push.unwrap_or_else(|| panic!("{kernel}: no variants")).emit(&mut table, kernel);
    }
    writeln!(table, "/// Every shader of the crate, in alphabetical order.").unwrap();
    let names: Vec<_> = names.iter().map(|n| format!("&{n}")).collect();
    writeln!(table, "pub static ALL: &[&crate::gpu::Shader] = &[{}];", names.join(", ")).unwrap();

    // The hash is part of the file name of the pipeline cache, so that changed shaders use a new cache.
    println!("cargo::rustc-env=SHADER_HASH={:016x}", hash.finish());

    let sources = fs::read_dir(&shaders)
        .unwrap()
        .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|x| x == "comp"));
    assert_eq!(sources.count(), variants.len(), "shaders/*.comp and variants.toml name different kernels");
    fs::write(PathBuf::from(env::var("OUT_DIR").unwrap()).join("shaders.rs"), table).unwrap();
}

/// Replaces each variant named `*_SUFFIX` with its combinations with every ordinary variant. A combination has the
/// defines of both, and `*` in its name is replaced with the name of the ordinary variant.
fn combine(variants: &mut BTreeMap<String, BTreeMap<String, String>>) {
    let (wildcards, ordinary): (Vec<_>, Vec<_>) =
        std::mem::take(variants).into_iter().partition(|(name, _)| name.starts_with('*'));
    for (wildcard, more) in &wildcards {
        for (name, defines) in &ordinary {
            let both = defines.iter().chain(more).map(|(k, v)| (k.clone(), v.clone())).collect();
            let name = if name == "only" { wildcard.replace("*_", "") } else { wildcard.replace('*', name) };
            variants.insert(name, both);
        }
    }
    variants.extend(ordinary);
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

/// Decorates the result of every sum and product of floats with NoContraction. Otherwise a driver may contract some of
/// them into an fma, and the last bit of a result would depend on the surrounding code. Shaders call `fma` explicitly
/// where they need it.
fn forbid_contraction(module: &mut Module) {
    let is_decorated = |module: &Module, id: u32| {
        let operands = [Operand::IdRef(id), Operand::Decoration(Decoration::NoContraction)];
        module.annotations.iter().any(|i| i.operands == operands)
    };
    let results: Vec<u32> = module
        .all_inst_iter()
        .filter(|i| {
            matches!(
                i.class.opcode,
                Op::FAdd | Op::FSub | Op::FMul | Op::FDiv | Op::FNegate | Op::VectorTimesScalar | Op::Dot
            )
        })
        .filter_map(|i| i.result_id)
        .collect();
    for id in results {
        if !is_decorated(module, id) {
            let operands = vec![Operand::IdRef(id), Operand::Decoration(Decoration::NoContraction)];
            module.annotations.push(Instruction::new(Op::Decorate, None, None, operands));
        }
    }
}

/// Makes writes to shared memory visible at barriers only. In a module with the Vulkan memory model, which cooperative
/// matrices require, glslang makes each access of shared memory available and visible to the workgroup. A driver then
/// waits for every load before the next one. Accesses remain non-private, so that barriers order them, and the barriers
/// make them available and visible (Vulkan memory model, "Availability and Visibility Semantics").
fn synchronize_at_barriers(module: &mut Module) {
    if !module
        .memory_model
        .as_ref()
        .is_some_and(|i| i.operands[1] == Operand::MemoryModel(MemoryModel::Vulkan))
    {
        return;
    }
    let by_id: BTreeMap<u32, Instruction> =
        module.all_inst_iter().filter_map(|i| Some((i.result_id?, i.clone()))).collect();
    let is_shared = |pointer: &Operand| {
        let of = by_id[&pointer.unwrap_id_ref()].result_type.expect("a pointer has a type");
        by_id[&of].operands[0] == Operand::StorageClass(StorageClass::Workgroup)
    };
    let at_accesses = MemoryAccess::MAKE_POINTER_AVAILABLE | MemoryAccess::MAKE_POINTER_VISIBLE;
    let at_barriers = MemorySemantics::ACQUIRE_RELEASE
        | MemorySemantics::WORKGROUP_MEMORY
        | MemorySemantics::MAKE_AVAILABLE
        | MemorySemantics::MAKE_VISIBLE;
    let uint = module.types_global_values.iter().find(|i| {
        i.class.opcode == Op::TypeInt && i.operands == [Operand::LiteralBit32(32), Operand::LiteralBit32(0)]
    });
    let uint = uint.expect("a shader with barriers has unsigned integers").result_id;
    let header = module.header.as_mut().expect("a module has a header");
    let semantics = header.bound;
    header.bound += 1;
    let value = vec![Operand::LiteralBit32(at_barriers.bits())];
    module.types_global_values.push(Instruction::new(Op::Constant, uint, Some(semantics), value));

    for i in module.functions.iter_mut().flat_map(|function| function.all_inst_iter_mut()) {
        if let (Op::ControlBarrier, [_, _, Operand::IdMemorySemantics(id)]) =
            (i.class.opcode, &mut i.operands[..])
        {
            let plain = MemorySemantics::ACQUIRE_RELEASE | MemorySemantics::WORKGROUP_MEMORY;
            assert_eq!(
                by_id[id].operands,
                [Operand::LiteralBit32(plain.bits())],
                "a barrier of another kind"
            );
            *id = semantics;
        }
        if let Some(at) = i.operands.iter().position(|operand| matches!(operand, Operand::MemoryAccess(_)))
            && is_shared(&i.operands[0])
        {
            if let Operand::MemoryAccess(flags) = &mut i.operands[at] {
                flags.remove(at_accesses);
            }
            i.operands.retain(|operand| !matches!(operand, Operand::IdScope(_)));
        }
    }
}

/// How a shader accesses the memory at a buffer address. Corresponds to `gpu::Access` in the crate.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Access {
    /// The variant does not use the address.
    None,
    Read,
    Write,
    ReadWrite,
}

/// One push constant. `access` is set for buffer addresses.
struct Member {
    name: String,
    rust: &'static str,
    access: Option<Access>,
}

/// A shader's push constants, in order.
struct PushBlock {
    members: Vec<Member>,
    bytes: u32,
    /// Whether a variant reads through addresses that it finds in memory.
    follows: bool,
}

/// Types, constants and variables of a module, by id.
struct Globals<'a>(&'a Module);

impl<'a> Globals<'a> {
    fn find(&self, id: u32) -> &'a Instruction {
        let all = &self.0.types_global_values;
        all.iter().find(|i| i.result_id == Some(id)).unwrap_or_else(|| panic!("%{id} is not defined"))
    }

    /// The name of an id, or of a member of a struct.
    fn name(&self, id: u32, member: Option<u32>) -> Option<String> {
        self.0.debug_names.iter().find_map(|i| match (i.class.opcode, i.operands.as_slice(), member) {
            (Op::Name, [Operand::IdRef(of), Operand::LiteralString(name)], None) if *of == id => {
                Some(name.clone())
            }
            (
                Op::MemberName,
                [Operand::IdRef(of), Operand::LiteralBit32(m), Operand::LiteralString(name)],
                Some(member),
            ) if *of == id && *m == member => Some(name.clone()),
            _ => None,
        })
    }

    /// The access that a pointer to a buffer allows, from `readonly` and `writeonly` of its type. glslang rejects
    /// shaders that violate these qualifiers.
    fn access(&self, pointer: &Instruction) -> Access {
        let block = pointer.operands[1].unwrap_id_ref();
        let members = self.find(block).operands.len() as u32;
        let all_are = |decoration: Decoration| {
            (0..members).all(|member| {
                self.0.annotations.iter().any(|i| {
                    i.class.opcode == Op::MemberDecorate
                        && i.operands[0] == Operand::IdRef(block)
                        && i.operands[1] == Operand::LiteralBit32(member)
                        && i.operands[2] == Operand::Decoration(decoration)
                })
            })
        };
        match (all_are(Decoration::NonWritable), all_are(Decoration::NonReadable)) {
            (true, false) => Access::Read,
            (false, true) => Access::Write,
            _ => Access::ReadWrite,
        }
    }

    fn is_buffer_pointer(&self, id: u32) -> bool {
        let found = self.0.types_global_values.iter().find(|i| i.result_id == Some(id));
        found.is_some_and(|i| {
            i.class.opcode == Op::TypePointer
                && i.operands[0] == Operand::StorageClass(StorageClass::PhysicalStorageBuffer)
        })
    }

    /// Bytes of a type, as a Rust expression over the specialization constants `c`.
    fn bytes(&self, id: u32) -> String {
        let i = self.find(id);
        match i.class.opcode {
            Op::TypeInt | Op::TypeFloat => (i.operands[0].unwrap_literal_bit32() / 8).to_string(),
            Op::TypeVector => {
                let n = i.operands[1].unwrap_literal_bit32();
                format!("{n} * {}", self.bytes(i.operands[0].unwrap_id_ref()))
            }
            Op::TypeArray => {
                let [of, length] = [0, 1].map(|n| i.operands[n].unwrap_id_ref());
                format!("{} * {}", self.value(length), self.bytes(of))
            }
            other => panic!("shared memory has a type that build.rs knows no size of: {other:?}"),
        }
    }

    /// A constant, as a Rust expression over the specialization constants `c`.
    fn value(&self, id: u32) -> String {
        let i = self.find(id);
        match i.class.opcode {
            Op::Constant => i.operands[0].unwrap_literal_bit32().to_string(),
            Op::SpecConstant => {
                let constants = spec_constants(self.0);
                let at = constants.iter().position(|c| c.2 == id).expect("it has an id");
                format!("c[{at}]")
            }
            Op::SpecConstantOp => {
                let [left, right] = [1, 2].map(|n| self.value(i.operands[n].unwrap_id_ref()));
                let operator = match i.operands[0].unwrap_literal_spec_constant_op_integer() {
                    Op::IAdd => "+",
                    Op::ISub => "-",
                    Op::IMul => "*",
                    Op::UDiv => "/",
                    other => panic!("a constant computed by {other:?}"),
                };
                format!("({left} {operator} {right})")
            }
            other => panic!("not a constant: {other:?}"),
        }
    }
}

impl PushBlock {
    fn of(name: &str, module: &Module) -> PushBlock {
        let globals = Globals(module);
        let Some(variable) = module.types_global_values.iter().find(|i| {
            i.class.opcode == Op::Variable
                && i.operands[0] == Operand::StorageClass(StorageClass::PushConstant)
        }) else {
            panic!("{name}: has no push constants");
        };
        let pointer = globals.find(variable.result_type.unwrap());
        let block = globals.find(pointer.operands[1].unwrap_id_ref());
        let id = block.result_id.unwrap();
        let used = Self::used(name, module, variable.result_id.unwrap());

        let mut members = Vec::new();
        let mut bytes = 0;
        for (index, member) in (0..).zip(&block.operands) {
            let found = globals.find(member.unwrap_id_ref());
            let (rust, access) = match found.class.opcode {
                Op::TypePointer if used.contains(&index) => ("u64", Some(globals.access(found))),
                Op::TypePointer => ("u64", Some(Access::None)),
                Op::TypeFloat => ("f32", None),
                Op::TypeInt if found.operands[1] == Operand::LiteralBit32(0) => ("u32", None),
                other => {
                    panic!("{name}: push constant {index} has a type without a Rust equivalent: {other:?}")
                }
            };
            let field = globals.name(id, Some(index)).expect("members are named");
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
            members.push(Member { name: field, rust, access });
        }
        if members.iter().any(|m| m.rust == "u64") && bytes % 8 != 0 {
            bytes += 4;
        }
        assert!(
            bytes <= 128,
            "{name}: {bytes} bytes of push constants; expected at most 128, as every device has"
        );
        PushBlock { members, bytes, follows: Self::follows(name, module) }
    }

    /// Indices of the members that the code uses. Each use begins with an access chain from the block.
    fn used(name: &str, module: &Module, block: u32) -> Vec<u32> {
        let globals = Globals(module);
        let mut used = Vec::new();
        for i in module.all_inst_iter().filter(|i| !matches!(i.class.opcode, Op::Name | Op::EntryPoint)) {
            if i.result_id == Some(block) || !i.operands.contains(&Operand::IdRef(block)) {
                continue;
            }
            assert_eq!(i.class.opcode, Op::AccessChain, "{name}: the push constants are used as a whole");
            let member = globals.find(i.operands[1].unwrap_id_ref());
            used.push(member.operands[0].unwrap_literal_bit32());
        }
        used
    }

    /// Whether the shader converts integers to addresses, as it does with addresses that it reads from memory. Memory
    /// at such an address must be readonly: barriers cannot be derived for it, because it is not in the push constants.
    fn follows(name: &str, module: &Module) -> bool {
        let globals = Globals(module);
        let mut follows = false;
        for i in module.all_inst_iter() {
            let Some(pointer) = i.result_type.filter(|id| globals.is_buffer_pointer(*id)) else { continue };
            // Casting a pointer to another type does not create an address.
            let is_pointer = |operand: &Operand| {
                let id = operand.unwrap_id_ref();
                let source = module.all_inst_iter().find(|source| source.result_id == Some(id));
                source.and_then(|source| source.result_type).is_some_and(|of| globals.is_buffer_pointer(of))
            };
            if matches!(i.class.opcode, Op::Bitcast | Op::ConvertUToPtr) && !is_pointer(&i.operands[0]) {
                assert_eq!(
                    globals.access(globals.find(pointer)),
                    Access::Read,
                    "{name}: an address from memory has a type that is not readonly"
                );
                follows = true;
            }
        }
        follows
    }

    /// Merges the push constants of another variant of the kernel.
    fn join(&mut self, name: &str, other: PushBlock) {
        let fields = |block: &PushBlock| -> Vec<(String, &str)> {
            block.members.iter().map(|m| (m.name.clone(), m.rust)).collect()
        };
        assert!(fields(self) == fields(&other), "{name}: its push constants differ from the other variants'");
        for (mine, other) in self.members.iter_mut().zip(other.members) {
            if other.access == Some(Access::None) {
                mine.access = other.access; // optional, because one of the variants does not use it
            }
        }
        self.follows |= other.follows;
    }

    /// Writes the struct of a dispatch's arguments. It has buffers where the shader has addresses.
    fn emit(&self, out: &mut String, kernel: &str) {
        let camel: String = kernel.split('_').map(|w| w[..1].to_uppercase() + &w[1..]).collect();
        let mut line = |text: String| writeln!(out, "{text}").unwrap();
        // A buffer is optional if some variant does not use the address, or if its name ends in `_or_none`.
        let is_optional = |m: &&Member| m.access == Some(Access::None) || m.name.ends_with("_or_none");
        line(format!(
            "/// Arguments of `{kernel}.comp`, generated from its SPIR-V: buffers where the shader has addresses."
        ));
        line(format!("pub struct {camel}<'a> {{"));
        for m in &self.members {
            let rust = match (m.access, is_optional(&m)) {
                (None, _) => m.rust,
                (_, false) => "&'a crate::gpu::Buffer",
                (_, true) => "Option<&'a crate::gpu::Buffer>",
            };
            line(format!("    pub {}: {rust},", m.name));
        }
        if self.follows {
            line("    /// The buffers of the addresses that the shader reads from memory.".to_string());
            line("    pub followed: &'a [&'a crate::gpu::Buffer],".to_string());
        }
        line("}".to_string());
        line(format!(
            "#[repr(C)]\n#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]\npub struct {camel}Push {{"
        ));
        let mut bytes = 0;
        for m in &self.members {
            line(format!("    pub {}: {},", m.name, m.rust));
            bytes += if m.rust == "u64" { 8 } else { 4 };
        }
        let pad = bytes != self.bytes;
        if pad {
            line("    _pad: u32,".to_string());
        }
        line(format!("}}\nconst _: () = assert!(size_of::<{camel}Push>() == {});", self.bytes));
        line(format!("impl crate::gpu::Arguments for {camel}<'_> {{"));
        line(format!("    const KERNEL: &'static str = {kernel:?};\n    type Push = {camel}Push;"));
        let pointers: Vec<_> = self.members.iter().filter(|m| m.access.is_some()).collect();
        let buffers: Vec<_> =
            pointers
                .iter()
                .map(|m| {
                    if is_optional(m) { format!("self.{}", m.name) } else { format!("Some(self.{})", m.name) }
                })
                .collect();
        line("    fn buffers(&self) -> impl Iterator<Item = Option<&crate::gpu::Buffer>> {".to_string());
        line(format!("        [{}].into_iter()\n    }}", buffers.join(", ")));
        let followed = if self.follows { "self.followed" } else { "&[]" };
        line(format!("    fn followed(&self) -> &[&crate::gpu::Buffer] {{\n        {followed}\n    }}"));
        line(format!("    fn push(&self) -> {camel}Push {{\n        {camel}Push {{"));
        for m in &self.members {
            let value = match (m.access, is_optional(&m)) {
                (None, _) => format!("self.{}", m.name),
                (_, false) => format!("self.{}.address()", m.name),
                (_, true) => format!("self.{}.map_or(0, crate::gpu::Buffer::address)", m.name),
            };
            line(format!("            {}: {value},", m.name));
        }
        if pad {
            line("            _pad: 0,".to_string());
        }
        line("        }\n    }\n}\n".to_string());
    }
}

/// Specialization constants as (number, name, id), ordered by number.
fn spec_constants(module: &Module) -> Vec<(u32, String, u32)> {
    let constant = |i: &Instruction| match i.operands.as_slice() {
        [Operand::IdRef(id), Operand::Decoration(Decoration::SpecId), Operand::LiteralBit32(number)] => {
            Some((*number, Globals(module).name(*id, None).unwrap_or_default(), *id))
        }
        _ => None,
    };
    let mut all: Vec<_> = module.annotations.iter().filter_map(constant).collect();
    all.sort();
    all
}

/// The device features that a SPIR-V capability needs; empty if every Vulkan 1.3 device has it.
fn needs(name: &str, capability: Capability) -> &'static [&'static str] {
    match capability {
        Capability::Shader | Capability::GroupNonUniform => &[],
        Capability::PhysicalStorageBufferAddresses => &["BufferDeviceAddress"],
        Capability::GroupNonUniformArithmetic => &["SubgroupArithmetic"],
        // Shaders that exchange data between lanes assume 32 lanes.
        Capability::GroupNonUniformBallot => &["SubgroupBallot", "SubgroupsOf32"],
        Capability::GroupNonUniformShuffle => &["SubgroupShuffle", "SubgroupsOf32"],
        Capability::Float16 => &["Float16"],
        Capability::Int8 => &["Int8"],
        Capability::Int16 => &["Int16"],
        Capability::StorageBuffer8BitAccess => &["Storage8"],
        Capability::StorageBuffer16BitAccess => &["Storage16"],
        Capability::DotProduct | Capability::DotProductInput4x8BitPacked => &["IntegerDotProduct"],
        // Only shaders with cooperative matrices declare the memory model, and gpu/caps.rs enables both together.
        Capability::CooperativeMatrixKHR => &["CooperativeMatrix", "SubgroupsOf32"],
        Capability::VulkanMemoryModel => &[],
        other => panic!("{name}: add the feature of {other:?} to build.rs, and its check to gpu/caps.rs"),
    }
}

fn emit_shader(
    out: &mut String,
    kernel: &str,
    name: &str,
    words: &[u32],
    module: &Module,
    block: &PushBlock,
) {
    let out_dir = PathBuf::from(env::var("OUT_DIR").unwrap());
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    fs::write(out_dir.join(format!("{name}.spv")), bytes).unwrap();

    let globals = Globals(module);
    let list = |items: Vec<String>| format!("&[{}]", items.join(", "));
    let constants = spec_constants(module).iter().map(|(id, name, _)| format!("({id}, {name:?})")).collect();
    let pointer = |m: &Member| Some(format!("({:?}, crate::gpu::Access::{:?})", m.name, m.access?));
    let pointers = block.members.iter().filter_map(pointer).collect();
    let capabilities = module.capabilities.iter().map(|i| i.operands[0].unwrap_capability());
    let multiplies_tiles =
        capabilities.clone().any(|capability| capability == Capability::CooperativeMatrixKHR);
    let needs = capabilities
        .flat_map(|capability| needs(name, capability))
        .map(|need| format!("crate::gpu::Need::{need}"))
        .collect();
    let workgroup = module.execution_modes.iter().find_map(|i| match i.operands.as_slice() {
        [_, Operand::ExecutionMode(ExecutionMode::LocalSize), x, y, z] => {
            Some([x, y, z].map(|n| n.unwrap_literal_bit32()))
        }
        _ => None,
    });
    let workgroup =
        workgroup.unwrap_or_else(|| panic!("{name}: the size of its workgroups is not a literal"));
    let shared: Vec<_> = module
        .types_global_values
        .iter()
        .filter(|i| {
            i.class.opcode == Op::Variable && i.operands[0] == Operand::StorageClass(StorageClass::Workgroup)
        })
        .map(|i| globals.find(i.result_type.unwrap()).operands[1].unwrap_id_ref())
        .map(|id| globals.bytes(id))
        .collect();
    let shared = match shared.is_empty() {
        true => "0".to_string(),
        false if multiplies_tiles => format!("crate::gpu::sum_of_aligned({})", list(shared)),
        false => shared.join(" + "),
    };
    writeln!(
        out,
        "pub static {}: crate::gpu::Shader = crate::gpu::Shader {{ name: {name:?}, kernel: {kernel:?}, constants: {}, \
         pointers: {}, follows: {}, needs: {}, workgroup: {workgroup:?}, \
         shared_bytes: |{}| {shared}, spirv: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.spv\")) }};",
        name.to_uppercase(),
        list(constants),
        list(pointers),
        block.follows,
        list(needs),
        if shared.contains("c[") { "c" } else { "_" },
    )
    .unwrap();
}
