//! Counts the instructions and loops of an RDNA kernel in the assembly text that RADV prints. The text comes from
//! LLVM's disassembler, or from RADV's compiler (ACO) itself if LLVM is older than the GPU. This module needs no
//! device, and it is independent of the kernels.
//!
//! A loop reaches from a label to the branch back to that label, because the compiler emits each loop as one contiguous
//! piece. The text does not say how many times a loop runs; [`super::cost`] does.

use std::collections::HashMap;
use std::ops::{Add, AddAssign, Mul, Range};

use serde::Serialize;

/// The text is not assembly in RADV's format.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IsaError {
    #[error("no instructions in the driver's assembly")]
    Empty,
    #[error("the assembly branches to {0}, but has no such label")]
    Label(String),
}

/// Declares a struct of numbers, with its sum and its multiple.
macro_rules! counts {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$field_about:meta])* pub $field:ident,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct $name { $($(#[$field_about])* pub $field: u64,)* }

        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name { $($field: self.$field + other.$field,)* }
            }
        }

        impl Mul<u64> for $name {
            type Output = $name;
            fn mul(self, n: u64) -> $name {
                $name { $($field: self.$field * n,)* }
            }
        }
    };
}

counts! {
    /// Numbers of instructions, by the hardware unit that they occupy.
    pub struct Counts {
        pub instructions,
        /// Vector instructions. A dual issue counts as two, and a dot product or matrix product as one.
        pub valu,
        /// Dual issues: pairs of vector instructions that take the time of one instruction.
        pub dual,
        /// Dot products of four packed bytes.
        pub dot4,
        /// Matrix products of a wave (WMMA).
        pub wmma,
        /// Cycles for which a wave of 32 lanes occupies the vector units of its SIMD. A wave of 64 lanes takes twice as
        /// many. RDNA 3 may issue some f32 instructions for all 64 lanes in one cycle; the count ignores that.
        pub cycles,
        /// Multiply-adds per lane, in all instructions.
        pub macs,
        /// f32 operations per lane that round their result: multiply-adds, products and sums.
        pub f32_fma,
        pub f32_mul,
        pub f32_add,
        pub vector_loads,
        /// Vector loads that read 16 bytes per lane.
        pub wide_loads,
        /// Stores and atomics.
        pub vector_stores,
        pub scalar_loads,
        /// Bytes of all scalar loads. One read serves all lanes of a wave.
        pub scalar_bytes,
        /// Instructions of the scalar unit, which takes one cycle for each, however many lanes a wave has.
        pub salu,
        /// Branches. They take the scalar unit's place in a cycle.
        pub branches,
        /// Loads and stores of shared memory.
        pub lds,
        /// Cycles for which a wave of 32 lanes occupies the shared memory of its compute unit.
        pub lds_cycles,
        /// Waits for memory.
        pub waits,
    }
}

impl Counts {
    /// Counts an instruction that rounds an f32 result. `name` is the instruction's name without `v_`.
    fn rounds(&mut self, name: &str, operands: &str) {
        let name = name.trim_start_matches("dual_");
        let is_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        if is_any(&["fma_mix_f32"]) {
            // The instruction can read a factor in f16. If its addend is minus zero, it is only a product.
            let multiplies = operands.contains(", neg(0)");
            *(if multiplies { &mut self.f32_mul } else { &mut self.f32_fma }) += 1;
        } else if is_any(&["fma_f32", "fmac_f32", "fmaak_f32", "fmamk_f32", "mad_f32", "mac_f32"]) {
            self.f32_fma += 1;
        } else if is_any(&["mul_f32"]) {
            self.f32_mul += 1;
        } else if is_any(&["add_f32", "sub_f32", "subrev_f32"]) {
            self.f32_add += 1;
        }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        *self = *self + other;
    }
}

/// A loop of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loop {
    /// Indices of the loop's instructions, including the instructions of inner loops.
    pub span: Range<usize>,
    /// The index of the innermost loop around this one.
    pub parent: Option<usize>,
    /// Counts of the loop's instructions outside inner loops.
    pub own: Counts,
}

/// A kernel's instructions and loops.
#[derive(Debug, Clone)]
pub struct Program {
    /// The counts of each instruction, in the order of the text.
    pub instructions: Vec<Counts>,
    /// The sum of the counts of all instructions, each counted once.
    pub total: Counts,
    /// Loops in the order of their first instruction; an outer loop comes before its inner loops.
    pub loops: Vec<Loop>,
}

impl Program {
    pub fn parse(assembly: &str) -> Result<Program, IsaError> {
        let mut counts: Vec<Counts> = Vec::new();
        let (mut labels, mut branches) = (HashMap::new(), Vec::new());
        // The first words of an instruction that continues on the next line.
        let mut pending_words: Vec<u32> = Vec::new();
        for line in assembly.lines() {
            // The instruction's machine words follow the semicolon.
            let (line, words) = line.split_once(';').unwrap_or((line, ""));
            let words: Vec<u32> =
                words.split_whitespace().map_while(|word| u32::from_str_radix(word, 16).ok()).collect();
            // LLVM's disassembler rejects a load into s[104:107], half of which is vcc. It then decodes the load's
            // second word as the start of another instruction, so its listing is wrong until an instruction ends at the
            // end of a line. Up to there, this code decodes the machine words.
            if line.starts_with("(invalid instruction)") || (!pending_words.is_empty() && !words.is_empty()) {
                pending_words.extend(words);
                while let Some(length) =
                    pending_words.first().map(|first| words_of(*first)).filter(|n| *n <= pending_words.len())
                {
                    counts.push(count_words(&pending_words[..length]));
                    pending_words.drain(..length);
                }
                continue;
            }
            let Some(line) = line.strip_prefix(char::is_whitespace) else {
                if line.starts_with("BB") {
                    labels.insert(line.trim_end().trim_end_matches(':'), counts.len());
                }
                continue;
            };
            // In ACO's listing, the results and " = " precede the instruction.
            let line = line.split_once(" = ").map_or(line, |(_, instruction)| instruction).trim();
            if let Some(n) = repeats(line) {
                let last = *counts.last().ok_or(IsaError::Empty)?;
                counts.extend(std::iter::repeat_n(last, n));
            } else if !line.is_empty() {
                let (name, operands) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
                if name.starts_with("s_branch") || name.starts_with("s_cbranch") {
                    branches.push((counts.len(), operands.trim().trim_start_matches("block:")));
                }
                counts.push(count(name, operands));
            }
        }
        if counts.is_empty() {
            return Err(IsaError::Empty);
        }
        let mut spans = HashMap::new();
        for (at, label) in branches {
            let to = *labels.get(label).ok_or_else(|| IsaError::Label(label.into()))?;
            if to <= at {
                let end: &mut usize = spans.entry(to).or_default();
                *end = (at + 1).max(*end);
            }
        }
        let mut spans: Vec<Range<usize>> = spans.into_iter().map(|(start, end)| start..end).collect();
        spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
        let mut loops: Vec<Loop> = Vec::new();
        for span in spans {
            let parent = loops.iter().rposition(|outer| outer.span.contains(&span.start));
            // If the spans of two backward branches overlap, they are one loop with two ends.
            let mut around = parent;
            while let Some(i) = around {
                loops[i].span.end = loops[i].span.end.max(span.end);
                around = loops[i].parent;
            }
            loops.push(Loop { span, parent, own: Counts::default() });
        }
        let mut total = Counts::default();
        for (at, each) in counts.iter().enumerate() {
            total += *each;
            if let Some(innermost) = loops.iter_mut().rev().find(|l| l.span.contains(&at)) {
                innermost.own += *each;
            }
        }
        Ok(Program { instructions: counts, total, loops })
    }

    /// Indices of the loops directly inside `outer`, or of the outermost loops.
    pub fn inside(&self, outer: Option<usize>) -> impl Iterator<Item = usize> {
        (0..self.loops.len()).filter(move |i| self.loops[*i].parent == outer)
    }

    /// Counts of one iteration of a loop. `trips` returns the number of iterations of each inner loop, by its index.
    pub fn trip(&self, index: usize, trips: &dyn Fn(usize) -> u64) -> Counts {
        let inside = self.inside(Some(index)).map(|i| self.trip(i, trips) * trips(i));
        inside.fold(self.loops[index].own, Add::add)
    }

    /// The loop with the most multiply-adds outside inner loops. `None`: no loop has a multiply-add.
    pub fn densest(&self) -> Option<usize> {
        // The first product of a sum is a multiplication without an addition, so products count too.
        let products = |i: usize| self.loops[i].own.macs + self.loops[i].own.f32_mul;
        let some = (0..self.loops.len()).filter(|i| self.loops[*i].own.macs > 0);
        some.max_by_key(|i| (products(*i), std::cmp::Reverse(*i)))
    }
}

/// The operations of a dual issue's halves that round. The index is the opcode.
const DUAL_OPS: [&str; 6] = ["fmac_f32", "fmaak_f32", "fmamk_f32", "mul_f32", "add_f32", "sub_f32"];

/// Counts an instruction that is given as machine words of RDNA 3.
fn count_words(words: &[u32]) -> Counts {
    let (word, second) = (words[0], words.get(1).copied().unwrap_or(0));
    let bits = |first: u32, count: u32| (word >> first & ((1 << count) - 1)) as usize;
    let half = |number: usize| DUAL_OPS.get(number).copied().unwrap_or("mov_b32");
    match (bits(26, 6), bits(25, 7)) {
        (0b11_0010, _) => {
            count(&format!("v_dual_{}", half(bits(22, 4))), &format!(":: v_dual_{}", half(bits(17, 5))))
        }
        (0b11_1101, _) => count(&format!("s_load_b{}", 32 << (bits(18, 8) & 7).min(4)), ""),
        (0b11_0111, _) => count(
            match bits(18, 7) {
                23 => "global_load_b128",
                24..=29 => "global_store_",
                _ => "global_load_",
            },
            "",
        ),
        (0b11_0011, _) => match bits(16, 7) {
            0x16 => count("v_dot4_i32_iu8", ""),
            // The third operand is the constant 0 (128), negated.
            0x20 if second >> 31 == 1 && second >> 18 & 0x1ff == 128 => count("v_fma_mix_f32", ", neg(0)"),
            0x20 => count("v_fma_mix_f32", ""),
            _ => count("v_mov_b32", ""),
        },
        (0b11_0101, _) => count(
            match bits(16, 10) {
                0x103 => "v_add_f32",
                0x108 => "v_mul_f32",
                0x213 => "v_fma_f32",
                _ => "v_mov_b32",
            },
            "",
        ),
        (_, 3) => count("v_add_f32", ""),
        (_, 8) => count("v_mul_f32", ""),
        (_, 43) => count("v_fmac_f32", ""),
        (_, ..64) => count("v_mov_b32", ""),
        // Scalar instructions without operands or with a 16-bit constant alone, and other encodings.
        _ if word >> 23 == 0x17f || word >> 30 != 0b10 => count("s_nop", ""),
        _ => count("s_mov_b32", ""),
    }
}

/// The number of machine words of an instruction, by its first word. An operand that refers to a literal adds one word:
/// operand 255 in every encoding, and more values in vector encodings.
fn words_of(word: u32) -> usize {
    let [first, second] = [word & 0xff, word >> 8 & 0xff];
    let more = match word >> 23 {
        // Vector instructions with one or two operands; `v_fmamk` and `v_fmaak` always have a literal.
        ..0x100 => [233, 234, 250, 255].contains(&(word & 0x1ff)) || [44, 45, 55, 56].contains(&(word >> 25)),
        // Scalar instructions: without operands or with a 16-bit constant; with one operand; with two operands.
        0x17f | 0x160..0x17d => false,
        0x17d => first == 255,
        0x100..0x180 => first == 255 || second == 255,
        // Dual issues, and then the other encodings, which have two words.
        0x190..0x198 => return 2 + usize::from(word & 0x1ff == 255),
        _ => true,
    };
    1 + usize::from(more)
}

/// The number in a line like `(then repeated 6 times)`, which means six more copies of the previous instruction.
fn repeats(line: &str) -> Option<usize> {
    line.strip_prefix("(then repeated ")?.strip_suffix(" times)")?.parse().ok()
}

fn count(name: &str, operands: &str) -> Counts {
    let mut c = Counts { instructions: 1, ..Counts::default() };
    if let Some(first) = name.strip_prefix("v_") {
        c.valu = 1;
        c.cycles = cycles(first);
        c.macs = macs(first);
        c.rounds(first, operands.split_once("::").map_or(operands, |(own, _)| own));
        c.dot4 = u64::from(first.starts_with("dot4_"));
        c.wmma = u64::from(first.starts_with("wmma_"));
        if let Some((_, second)) = operands.split_once("::") {
            c.valu = 2;
            c.dual = 1;
            let second = second.trim().trim_start_matches("v_");
            c.macs += macs(second);
            c.rounds(second, "");
        }
    } else if ["global_", "buffer_", "flat_", "scratch_"].iter().any(|prefix| name.starts_with(prefix)) {
        let is_load = name.contains("_load");
        c.vector_loads = u64::from(is_load);
        c.wide_loads = u64::from(is_load && (name.ends_with("_b128") || name.ends_with("_dwordx4")));
        c.vector_stores = u64::from(name.contains("_store") || name.contains("_atomic"));
    } else if name.starts_with("ds_") {
        c.lds = 1;
        c.lds_cycles = lds_cycles(name);
    } else if name.starts_with("s_load_") || name.starts_with("s_buffer_load_") {
        c.scalar_loads = 1;
        c.scalar_bytes = scalar_bytes(name);
    } else if name.starts_with("s_wait") && !name.ends_with("depctr") && !name.ends_with("_alu") {
        c.waits = 1;
    } else if name.starts_with("s_branch") || name.starts_with("s_cbranch") {
        c.branches = 1;
    } else if name.starts_with("s_") && !CONTROL.iter().any(|prefix| name.starts_with(prefix)) {
        c.salu = 1;
    }
    c
}

/// Instructions that the scalar unit does not execute: a wave's instruction buffer handles them, or a cache does.
const CONTROL: [&str; 15] = [
    "s_wait",
    "s_nop",
    "s_sleep",
    "s_clause",
    "s_delay_alu",
    "s_set_inst_prefetch",
    "s_inst_prefetch",
    "s_code_end",
    "s_endpgm",
    "s_barrier",
    "s_sendmsg",
    "s_icache_inv",
    "s_dcache_inv",
    "s_gl1_inv",
    "s_round_mode",
];

/// The bytes of a scalar load: `s_load_b256`, or `s_load_dwordx8` in ACO's listing.
fn scalar_bytes(name: &str) -> u64 {
    let width = name.rsplit('_').next().unwrap_or_default();
    match width.strip_prefix('b') {
        Some(bits) => bits.parse().map_or(0, |bits: u64| bits / 8),
        None => 4 * width.strip_prefix("dwordx").map_or(1, |words| words.parse().unwrap_or(1)),
    }
}

/// Shared memory moves 128 bytes a cycle for the lanes of a wave: one word for each of 32 lanes.
fn lds_cycles(name: &str) -> u64 {
    let pairs = 1 + u64::from(name.contains("_2addr_"));
    pairs
        * match name.rsplit('_').next() {
            Some("b128") => 4,
            Some("b96") => 3,
            Some("b64" | "u64") => 2,
            _ => 1,
        }
}

/// The cycles of an instruction, from the table that RADV uses for its estimates (`get_perf_info` in
/// aco_statistics.cpp): 4 for an integer product, 2 for a 64-bit operation, 32 for a matrix product, or 16 with int4.
/// Transcendental instructions count one cycle, because they do not occupy the other vector units.
fn cycles(name: &str) -> u64 {
    if name.starts_with("wmma_") {
        return if name.ends_with("_iu4") { 16 } else { 32 };
    }
    let is_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if is_any(&["mul_lo_u32", "mul_hi_u32", "mul_hi_i32", "mad_u64_u32", "mad_i64_i32"]) {
        4
    } else if is_any(&["lshlrev_b64", "lshrrev_b64", "ashrrev_i64"]) {
        2
    } else {
        1
    }
}

fn macs(name: &str) -> u64 {
    let name = name.trim_start_matches("dual_");
    let is_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if name.starts_with("wmma_") {
        // 16 x 16 x 16 multiply-adds, divided by the 32 lanes of a wave.
        128
    } else if is_any(&["dot8_"]) {
        8
    } else if is_any(&["dot4_"]) {
        4
    } else if is_any(&["dot2", "pk_fma", "pk_fmac"]) {
        2
    } else {
        u64::from(is_any(&["fma_", "fmac_", "fmaak_", "fmamk_", "mad_"]))
    }
}

/// The number of waves of `subgroup_size` lanes that a SIMD holds at the same time. `reported` is the driver's
/// statistic "Subgroups per SIMD". Since RDNA it counts waves of 32 lanes, so a wave of 64 lanes counts as two
/// (`radv_get_max_waves`).
pub fn real_waves(reported: u64, subgroup_size: u32) -> u64 {
    reported / u64::from(subgroup_size / 32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shortened loop of a matrix product, from Mesa 25.0.7 for gfx1103.
    const PRODUCT: &str = "\
BB0:
\tv_and_b32_e32 v1, 31, v0                                    ; 3602009f
\ts_load_b128 s[4:7], s[2:3], null                            ; f4080101 f8000000
BB1:
\ts_mov_b64 s[18:19], exec                                    ; be92017e
\tv_cmpx_le_u32_e32 s1, v2                                    ; 7d960401
BB2:
\ts_cbranch_scc0 BB106                                        ; bfa1023d
BB9:
\tv_lshlrev_b64 v[4:5], 4, v[4:5]                             ; d73c0004 00020884
\tglobal_load_b128 v[4:7], v[6:7], off                        ; dc5e0000 047c0006
\ts_cbranch_execz BB19                                        ; bfa50035
BB10:
\tglobal_load_b32 v12, v[12:13], off                          ; dc5e0000 0c7c000c
\ts_waitcnt vmcnt(0)                                          ; bf8903f7
\ts_waitcnt_depctr 0xfffd                                     ; bf88fffd
\tv_dual_fmac_f32 v10, v11, v13 :: v_dual_mul_f32 v3, v4, v5  ; 56141b0b
\tv_fma_mix_f32 v12, v11, 1.0, neg(0) op_sel:[1,0,0]          ; cc20080c 8a01e50b
\tv_mul_lo_u32 v6, v5, s15                                    ; d72c0006 00001f05
BB19:
\ts_branch BB1                                                ; bfa0fdbe
BB106:
\tds_store_b32 v4, v3                                         ; d8340000 00000304
\tglobal_store_b32 v[10:11], v4, off                          ; dc6a0000 007c040a
\ts_nop 0                                                     ; bf800000
\t(then repeated 6 times)
\ts_endpgm                                                    ; bfb00000
";

    #[test]
    fn instructions_are_counted_by_the_unit_that_they_occupy() {
        let program = Program::parse(PRODUCT).unwrap();
        let total = program.total;
        assert_eq!(
            (total.instructions, total.valu, total.dual),
            (25, 7, 1),
            "a dual issue counts as two vector instructions"
        );
        assert_eq!((total.vector_loads, total.wide_loads, total.vector_stores), (2, 1, 1));
        assert_eq!((total.scalar_loads, total.lds), (1, 1));
        assert_eq!(total.waits, 1, "s_waitcnt_depctr does not wait for memory");
        assert_eq!((total.salu, total.branches), (1, 3), "waits and s_nop do not occupy the scalar unit");
        assert_eq!((total.scalar_bytes, total.lds_cycles), (16, 1));
        assert_eq!(total.macs, 2);
        assert_eq!(total.cycles, 1 + 1 + 2 + 1 + 1 + 4, "a dual issue takes one cycle");
    }

    #[test]
    fn a_backward_branch_makes_a_loop_and_a_forward_branch_does_not() {
        let program = Program::parse(PRODUCT).unwrap();
        assert_eq!(program.loops.len(), 1);
        let Loop { span, parent, own } = &program.loops[0];
        assert_eq!((span.clone(), *parent), (2..15, None));
        assert_eq!((own.valu, own.vector_loads, own.lds), (6, 2, 0));
        assert_eq!(program.densest(), Some(0));
    }

    /// Attention's loops over keys: a loop over tiles, which contains a loop over subgroups and a loop over values.
    const NESTED: &str = "\
BB0:
\tv_mov_b32_e32 v1, 0
BB1:
\tv_fma_f32 v1, v2, v3, v4
\tv_fma_f32 v1, v2, v3, v4
BB2:
\tds_load_b32 v4, v5
\tv_max_f32_e32 v1, v2, v3
\ts_cbranch_scc1 BB2
BB3:
\tglobal_load_b64 v[1:2], v[3:4], off
\tv_fma_f32 v1, v2, v3, v4
\ts_cbranch_vccz BB3
BB4:
\ts_cbranch_execz BB5
\ts_branch BB1
BB5:
\ts_cbranch_scc0 BB1
\tv_dot4_i32_iu8 v1, v2, v3, v4 neg_lo:[1,1,0]
\tv_wmma_i32_16x16x16_iu8 v[1:8], v[9:12], v[13:16], v[1:8]
\ts_endpgm
";

    #[test]
    fn each_nested_loop_is_counted_with_its_own_trips() {
        let program = Program::parse(NESTED).unwrap();
        let spans: Vec<_> = program.loops.iter().map(|l| (l.span.clone(), l.parent)).collect();
        assert_eq!(spans, [(1..12, None), (3..6, Some(0)), (6..9, Some(0))], "two ends, one loop");
        assert_eq!(program.inside(None).collect::<Vec<_>>(), [0]);
        assert_eq!(program.loops[0].own.valu, 2);
        let trips = |index: usize| [1, 2, 64][index];
        let trip = program.trip(0, &trips);
        assert_eq!((trip.valu, trip.macs, trip.lds, trip.vector_loads), (2 + 2 + 64, 2 + 64, 2, 64));
        assert_eq!((program.total.dot4, program.total.wmma), (1, 1));
        assert_eq!(program.total.macs, 3 + 4 + 128);
        assert_eq!(program.total.cycles, 1 + 2 + 1 + 1 + 1 + 32);
    }

    /// ACO's listing, from Mesa 25.0.7 with an LLVM that does not support gfx1150.
    const ACO_LISTING: &str = "\
Shader disassembly is not supported in the current configuration, falling back to print_program.

After lowering to hw instructions:
ACO shader stage: SW (CS), HW (COMPUTE_SHADER)
BB0
/* logical preds: / linear preds: / kind: uniform, top-level, loop-preheader, */
\t v1: %7:v[1] = v_and_b32 31, %618:v[0]
BB1
/* logical preds: BB0, BB105, / linear preds: BB0, BB105, / kind: loop-header, branch, */
\t s2: %0:s[18-19] = s_mov_b64 %0:exec
\ts_delay_alu valu_dep_1
\t v2: %32:v[4-5] = v_lshlrev_b64_e64 4, %30:v[4-5]
\t v4: %34:v[4-7] = global_load_dwordx4 %33:v[6-7],  s1: undef storage:buffer semantics:private,reorder
\ts_cbranch_execz block:BB19
BB10
\t v1: %40:v[3] = v_fmac_f32 %1:v[1], %2:v[2], %3:v[3]
\ts_branch block:BB1
BB19
\ts_endpgm
";

    #[test]
    fn the_listing_of_aco_is_parsed() {
        let program = Program::parse(ACO_LISTING).unwrap();
        assert_eq!(program.total.instructions, 9);
        let Loop { span, own, .. } = &program.loops[0];
        assert_eq!((program.loops.len(), span.clone()), (1, 1..8));
        assert_eq!((own.valu, own.cycles, own.macs, own.wide_loads), (2, 3, 1, 1));
    }

    /// A listing from Mesa 25.0.7 with LLVM 15 for gfx1103.
    const REFUSED: &str = "\
\ts_load_b128 s[64:67], s[64:65], null                         ; f4081020 f8000000
(invalid instruction)                                        ; f4081a1f
\texp mrt0 off, off, off, off                                 ; f8000000 f4080f1e
\texp mrt0 off, off, off, off                                 ; f8000000 32686081
\tv_lshlrev_b32_e32 v4, 2, v3                                 ; 30080682
(invalid instruction)                                        ; f4081a34
\texp mrt0 off, off, off, off                                 ; f8000000 c8c04e4c
\tv_xor_b32_e32 v157, s82, v44                                ; 3b3a5852
\tv_fmac_f32_e32 v4, s21, v5                                  ; 56080a15
\ts_endpgm                                                    ; bfb00000
";

    #[test]
    fn loads_that_the_disassembler_rejects_are_counted() {
        let total = Program::parse(REFUSED).unwrap().total;
        assert_eq!((total.instructions, total.scalar_loads, total.valu), (9, 4, 5));
        assert_eq!((total.scalar_bytes, total.salu), (4 * 16, 0));
        assert_eq!(
            (total.dual, total.f32_mul, total.f32_fma),
            (1, 1, 2),
            "the first half is a product, the second a multiply-add"
        );
    }

    /// Lines after such a load, from two builds of `fast_matmul_int8`: LLVM decodes words of products as parts of other
    /// instructions.
    const REFUSED_BEFORE_A_PRODUCT: &str = "\
BB0:
(invalid instruction)                                        ; f40c1932
\texp mrt0 off, off, off, off                                 ; f8000000 f40009f0
\texp mrt0 off, off, off, off                                 ; f8000000 cc20025d
\ts_max_i32 s0, s55, s59                                      ; 8a003b37
\tv_fmac_f32_e32 v35, v90, v91                                ; 5646b75a
(invalid instruction)                                        ; f40c1932
\texp mrt0 off, off, off, off                                 ; f8000000 cc16405c
\ts_endpgm                                                    ; 7d70cb09
\ts_endpgm                                                    ; bfb00000
";

    #[test]
    fn products_that_are_misread_after_a_rejected_load_are_counted() {
        let total = Program::parse(REFUSED_BEFORE_A_PRODUCT).unwrap().total;
        assert_eq!((total.instructions, total.scalar_loads, total.valu), (7, 3, 3));
        assert_eq!((total.scalar_bytes, total.salu), (32 + 4 + 32, 0));
        assert_eq!((total.f32_mul, total.f32_fma, total.dot4), (1, 1, 1));
    }

    #[test]
    fn loads_of_shared_memory_and_of_scalars_are_counted_by_their_width() {
        let of = |name: &str| count(name, "");
        let lds = [
            "ds_load_b32",
            "ds_store_b64",
            "ds_load_2addr_b64",
            "ds_load_2addr_stride64_b32",
            "ds_load_b128",
        ];
        assert_eq!(lds.map(|name| of(name).lds_cycles), [1, 2, 4, 2, 4]);
        let scalar = ["s_load_b32", "s_load_b512", "s_buffer_load_b128", "s_load_dword", "s_load_dwordx8"];
        assert_eq!(scalar.map(|name| of(name).scalar_bytes), [4, 64, 16, 4, 32]);
        let control = ["s_delay_alu", "s_clause", "s_waitcnt_vmcnt", "s_barrier"];
        assert_eq!(control.map(|name| of(name).salu), [0; 4]);
    }

    #[test]
    fn text_that_is_not_assembly_is_refused() {
        assert_eq!(Program::parse("").unwrap_err(), IsaError::Empty);
        assert_eq!(Program::parse("BB0:\n").unwrap_err(), IsaError::Empty);
        let lost = Program::parse("BB0:\n\ts_branch BB7\n").unwrap_err();
        assert_eq!(lost, IsaError::Label("BB7".into()));
    }

    #[test]
    fn a_wave_of_64_lanes_is_reported_as_two() {
        assert_eq!(real_waves(32, 64), 16);
        assert_eq!(real_waves(8, 64), 4);
        assert_eq!(real_waves(16, 32), 16);
    }
}
