//! The container of a kernel, `axlf` (a file `.xclbin`). It is checked before XRT or the driver reads it.
//!
//! A container has a header, a table of sections, and the sections. This module reads these sections:
//!
//! | section | what is in it |
//! |---|---|
//! | `AIE_PARTITION` | how many columns the design uses, where they may start, and its PDIs, which configure the array |
//! | `EMBEDDED_METADATA` | the kernel's name and arguments, in XML |
//! | `IP_LAYOUT` | the kernel's instance, and the id by which a PDI names it |
//!
//! Offsets and counts in the file are not trusted: each is checked before it is used, and no allocation is larger than
//! the file. The layout is defined in XRT's `xrt/detail/xclbin.h`, which the driver uses too. A test has a container
//! that XRT's `xclbinutil` wrote.

use super::contract::MAX_GROUPS;

/// Maximum size of a container. A PDI of four columns has less than 1 MiB.
pub const MAX_BYTES: u64 = 64 << 20;

const MAGIC: &[u8; 8] = b"xclbin2\0";
const KERNEL: &str = "MLIR_AIE";
/// The kernel's arguments before the buffers: the opcode, the instructions, and the number of their words.
const FIRST_BUFFER: usize = 3;
const BUFFERS: usize = 5;
/// The columns of the array of a Ryzen AI 7040 or 8040; a partition takes up to four of them.
const ARRAY_COLUMNS: u32 = 5;

/// Offsets in the header, whose own offset is 304.
const LENGTH: usize = 304;
const SECTIONS: usize = 304 + 144;
const HEADER_BYTES: usize = 304 + 152;
const SECTION_BYTES: usize = 40;
const MAX_SECTIONS: u32 = 64;

const EMBEDDED_METADATA: u32 = 2;
const IP_LAYOUT: u32 = 8;
const AIE_PARTITION: u32 = 32;

const PARTITION_BYTES: usize = 184;
const PDI_BYTES: usize = 96;
const GROUP_BYTES: usize = 96;
const IP_BYTES: usize = 80;
const IP_PS_KERNEL: u32 = 7;

/// What is wrong with a container: what was found, where, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} of the container: {found}; {expected} is expected")]
pub struct ContainerError {
    pub at: usize,
    pub found: String,
    pub expected: String,
}

fn error<T>(at: usize, found: impl Into<String>, expected: impl Into<String>) -> Result<T, ContainerError> {
    Err(ContainerError { at, found: found.into(), expected: expected.into() })
}

/// The content of a container, as far as the transport depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The columns of the partition.
    pub columns: u32,
    /// The columns at which the partition may start.
    pub start_columns: Vec<u16>,
    /// The id of the kernel, which a PDI has too.
    pub kernel_id: u32,
}

impl Container {
    /// Reads a container, and checks that it has exactly one kernel `MLIR_AIE` with this project's arguments.
    pub fn parse(bytes: &[u8]) -> Result<Container, ContainerError> {
        let file = Span { bytes, start: 0 };
        let sections = sections(file)?;
        metadata(one(&sections, EMBEDDED_METADATA, "EMBEDDED_METADATA")?)?;
        let kernel_id = ip_layout(one(&sections, IP_LAYOUT, "IP_LAYOUT")?)?;
        let (columns, start_columns) = partition(one(&sections, AIE_PARTITION, "AIE_PARTITION")?, kernel_id)?;
        Ok(Container { columns, start_columns, kernel_id })
    }
}

/// A contiguous range of the file's bytes, which knows its position in the file.
#[derive(Debug, Clone, Copy)]
struct Span<'a> {
    bytes: &'a [u8],
    start: usize,
}

impl<'a> Span<'a> {
    /// The `len` bytes at `offset`. `what` names them in an error.
    fn part(self, offset: usize, len: usize, what: &str) -> Result<Span<'a>, ContainerError> {
        let part = offset.checked_add(len).and_then(|end| self.bytes.get(offset..end));
        match part {
            Some(bytes) => Ok(Span { bytes, start: self.start + offset }),
            None => error(
                self.start,
                format!("{what} has {len} bytes at {offset} of {}", self.bytes.len()),
                "a place within what holds it",
            ),
        }
    }

    fn u16(self, offset: usize, what: &str) -> Result<u16, ContainerError> {
        self.array(offset, what).map(u16::from_le_bytes)
    }

    fn u32(self, offset: usize, what: &str) -> Result<u32, ContainerError> {
        self.array(offset, what).map(u32::from_le_bytes)
    }

    fn u64(self, offset: usize, what: &str) -> Result<u64, ContainerError> {
        self.array(offset, what).map(u64::from_le_bytes)
    }

    fn array<const N: usize>(self, offset: usize, what: &str) -> Result<[u8; N], ContainerError> {
        let part = self.part(offset, N, what)?;
        Ok(part.bytes.try_into().expect("a part has the length that was asked for"))
    }

    /// The elements of an array elsewhere in this section. Its count and its offset are at `offset`.
    fn elements(
        self,
        offset: usize,
        size: usize,
        most: u32,
        what: &str,
    ) -> Result<Vec<Span<'a>>, ContainerError> {
        let (count, at) = (self.u32(offset, what)?, self.u32(offset + 4, what)?);
        if !(1..=most).contains(&count) {
            return error(self.start + offset, format!("{count} {what}"), format!("1 to {most}"));
        }
        // `most` is small, so the product does not overflow.
        let whole = self.part(at as usize, count as usize * size, what)?;
        (0..count as usize).map(|i| whole.part(i * size, size, what)).collect()
    }
}

/// The sections by kind. They follow the table in the file, and no two of them share a byte.
fn sections<'a>(file: Span<'a>) -> Result<Vec<(u32, Span<'a>)>, ContainerError> {
    let magic = file.bytes.get(..MAGIC.len()).unwrap_or(file.bytes);
    if magic != MAGIC {
        return error(0, format!("\"{}\"", magic.escape_ascii()), "xclbin2, the beginning of an xclbin,");
    }
    let (length, whole) = (file.u64(LENGTH, "the length")?, file.bytes.len());
    if length != whole as u64 {
        return error(LENGTH, format!("a length of {length} bytes"), format!("the file's {whole}"));
    }
    let count = file.u32(SECTIONS, "the number of sections")?;
    if !(1..=MAX_SECTIONS).contains(&count) {
        return error(SECTIONS, format!("{count} sections"), format!("1 to {MAX_SECTIONS}"));
    }
    let table = file.part(HEADER_BYTES, count as usize * SECTION_BYTES, "the table of sections")?;
    let table_end = table.start + table.bytes.len();
    let mut sections: Vec<(u32, Span)> = Vec::new();
    for i in 0..count as usize {
        let header = table.part(i * SECTION_BYTES, SECTION_BYTES, "a section's header")?;
        let kind = header.u32(0, "a section's kind")?;
        let (offset, size) = (header.u64(24, "a section's offset")?, header.u64(32, "a section's size")?);
        let place = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
        let place = place.filter(|(offset, size)| {
            *offset >= table_end && offset.checked_add(*size).is_some_and(|end| end <= whole)
        });
        let Some((offset, size)) = place else {
            return error(
                header.start,
                format!("section {i} of kind {kind} has {size} bytes at {offset}"),
                format!("a place from {table_end} to {whole}"),
            );
        };
        sections.push((kind, file.part(offset, size, "a section")?));
    }
    let mut in_order: Vec<Span> = sections.iter().map(|(_, section)| *section).collect();
    in_order.sort_by_key(|section| (section.start, section.bytes.len()));
    for pair in in_order.windows(2) {
        let end = pair[0].start + pair[0].bytes.len();
        if end > pair[1].start {
            return error(
                pair[1].start,
                format!("a section begins, and the one before it ends at {end}"),
                "a byte to be of one section",
            );
        }
    }
    Ok(sections)
}

/// The only section of this kind.
fn one<'a>(sections: &[(u32, Span<'a>)], kind: u32, name: &str) -> Result<Span<'a>, ContainerError> {
    let mut found = sections.iter().filter(|(other, _)| *other == kind).map(|(_, section)| *section);
    match (found.next(), found.next()) {
        (Some(section), None) => Ok(section),
        (None, _) => error(HEADER_BYTES, format!("no section {name}"), "one"),
        (_, Some(second)) => error(second.start, format!("a second section {name}"), "one"),
    }
}

/// The columns of the partition, and the columns at which it may start. One of its PDIs belongs to the kernel.
fn partition(section: Span, kernel_id: u32) -> Result<(u32, Vec<u16>), ContainerError> {
    section.part(0, PARTITION_BYTES, "the partition")?;
    let columns = u32::from(section.u16(32, "the partition's width")?);
    if !(1..=MAX_GROUPS).contains(&columns) {
        return error(
            section.start + 32,
            format!("a partition of {columns} columns"),
            format!("1 to {MAX_GROUPS}"),
        );
    }
    let mut starts = Vec::new();
    for start in section.elements(40, 2, ARRAY_COLUMNS, "columns to start at")? {
        let column = start.u16(0, "a column to start at")?;
        if u32::from(column) + columns > ARRAY_COLUMNS {
            return error(
                start.start,
                format!("{columns} columns from column {column}"),
                format!("columns below {ARRAY_COLUMNS}"),
            );
        }
        starts.push(column);
    }
    let mut ids = Vec::new();
    for pdi in section.elements(120, PDI_BYTES, 16, "PDIs")? {
        let bytes = pdi.u32(16, "a PDI's size")?;
        let image = section.part(pdi.u32(20, "a PDI's offset")? as usize, bytes as usize, "a PDI's image")?;
        if image.bytes.is_empty() {
            return error(pdi.start + 16, "a PDI without an image", "its bytes");
        }
        // Offsets count from the section's start, even inside nested structures.
        let at = pdi.start - section.start + 24;
        for group in section.elements(at, GROUP_BYTES, 16, "groups of a PDI")? {
            let at = group.start - section.start + 16;
            for id in section.elements(at, 8, 64, "kernels of a PDI")? {
                ids.push(id.u64(0, "a kernel's id")?);
            }
        }
    }
    if !ids.contains(&u64::from(kernel_id)) {
        return error(
            section.start + 120,
            format!("PDIs for kernels {ids:x?}"),
            format!("one for {kernel_id:x}"),
        );
    }
    Ok((columns, starts))
}

/// The id of the kernel's only instance.
fn ip_layout(section: Span) -> Result<u32, ContainerError> {
    let count = section.u32(0, "the number of instances")?;
    if count != 1 {
        return error(section.start, format!("{count} instances of kernels"), "1");
    }
    let ip = section.part(8, IP_BYTES, "an instance")?;
    let kind = ip.u32(0, "an instance's type")?;
    if kind != IP_PS_KERNEL {
        return error(ip.start, format!("an instance of type {kind}"), format!("{IP_PS_KERNEL}, a kernel"));
    }
    let name: [u8; 64] = ip.array(16, "an instance's name")?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let kernel = name.split(|byte| *byte == b':').next().unwrap_or_default();
    if kernel != KERNEL.as_bytes() {
        return error(
            ip.start + 16,
            format!("an instance of the kernel \"{}\"", kernel.escape_ascii()),
            KERNEL.to_string(),
        );
    }
    // Bits 16 to 27 of the properties.
    Ok(ip.u32(4, "an instance's properties")? >> 16 & 0xfff)
}

/// Checks the kernel and its arguments: their order, and which of them are buffers.
fn metadata(section: Span) -> Result<(), ContainerError> {
    let mut kernels = 0;
    let mut arguments = 0;
    // Whether the current tags are inside the kernel.
    let mut inside = false;
    let mut tags = Tags { section, at: 0 };
    while let Some(tag) = tags.next()? {
        let at = tag.at;
        match tag.name {
            b"kernel" => {
                let name = tag.attribute(b"name").unwrap_or_default();
                kernels += 1;
                inside = !tag.is_empty;
                if name != KERNEL.as_bytes() || kernels > 1 {
                    let found = format!("kernel {kernels} \"{}\"", shortened(name));
                    return error(at, found, format!("one kernel, {KERNEL}"));
                }
            }
            b"/kernel" => inside = false,
            b"arg" if inside => {
                let is_buffer = arguments == 1 || arguments >= FIRST_BUFFER;
                let (id, kind) = (tag.attribute(b"id"), tag.attribute(b"addressQualifier"));
                let expected = (arguments.to_string(), if is_buffer { "1" } else { "0" });
                if (id, kind) != (Some(expected.0.as_bytes()), Some(expected.1.as_bytes())) {
                    return error(
                        at,
                        format!(
                            "argument {arguments} has id {} and address qualifier {}",
                            shortened(id.unwrap_or(b"none")),
                            shortened(kind.unwrap_or(b"none"))
                        ),
                        format!("{} and {}", expected.0, expected.1),
                    );
                }
                arguments += 1;
            }
            _ => {}
        }
    }
    let expected = FIRST_BUFFER + BUFFERS;
    if kernels == 0 || arguments != expected {
        return error(
            section.start,
            format!("{kernels} kernels with {arguments} arguments"),
            format!("one kernel {KERNEL} with {expected}"),
        );
    }
    Ok(())
}

/// Text of the file, for an error.
fn shortened(text: &[u8]) -> String {
    text[..text.len().min(40)].escape_ascii().to_string()
}

/// The tags of XML as `xclbinutil` writes it: without CDATA sections, and without `>` in comments.
struct Tags<'a> {
    section: Span<'a>,
    at: usize,
}

/// A tag: its name, with the `/` of a closing tag, and the text after it.
struct Tag<'a> {
    at: usize,
    name: &'a [u8],
    rest: &'a [u8],
    is_empty: bool,
}

impl<'a> Tags<'a> {
    fn next(&mut self) -> Result<Option<Tag<'a>>, ContainerError> {
        let bytes = self.section.bytes;
        let Some(open) = find(&bytes[self.at..], |byte| byte == b'<') else { return Ok(None) };
        let start = self.at + open + 1;
        // A `>` within quotes is text.
        let mut quote = None;
        let close = find(&bytes[start..], |byte| match quote {
            Some(mark) => {
                if byte == mark {
                    quote = None;
                }
                false
            }
            None if byte == b'"' || byte == b'\'' => {
                quote = Some(byte);
                false
            }
            None => byte == b'>',
        });
        let at = self.section.start + start;
        let Some(length) = close else { return error(at, "a tag without an end", "its `>`") };
        self.at = start + length + 1;
        let inner = &bytes[start..start + length];
        let (inner, is_empty) = match inner.strip_suffix(b"/") {
            Some(inner) => (inner, true),
            None => (inner, false),
        };
        let end = find(inner, |byte| byte.is_ascii_whitespace()).unwrap_or(inner.len());
        Ok(Some(Tag { at, name: &inner[..end], rest: &inner[end..], is_empty }))
    }
}

impl<'a> Tag<'a> {
    /// The value of the first attribute of this name.
    fn attribute(&self, name: &[u8]) -> Option<&'a [u8]> {
        let mut rest = self.rest;
        loop {
            rest = rest.trim_ascii_start();
            let equals = find(rest, |byte| byte == b'=')?;
            let key = rest[..equals].trim_ascii_end();
            let (mark, value) = rest[equals + 1..].trim_ascii_start().split_first()?;
            if !matches!(mark, b'"' | b'\'') {
                return None;
            }
            let end = find(value, |byte| byte == *mark)?;
            if key == name {
                return Some(&value[..end]);
            }
            rest = &value[end + 1..];
        }
    }
}

fn find(bytes: &[u8], is: impl FnMut(u8) -> bool) -> Option<usize> {
    bytes.iter().copied().position(is)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `xclbinutil` 2.25 wrote it; tests/data/npu/README.md.
    const REAL: &[u8] = include_bytes!("../../tests/data/npu/xclbin/placeholder.xclbin");

    /// The offset of a section, and of its header.
    fn section(kind: u32) -> (usize, usize) {
        let headers = (0..7).map(|i| HEADER_BYTES + i * SECTION_BYTES);
        let file = Span { bytes: REAL, start: 0 };
        let header = headers.into_iter().find(|at| file.u32(*at, "").unwrap() == kind).unwrap();
        (file.u64(header + 24, "").unwrap() as usize, header)
    }

    fn with(changes: &[(usize, &[u8])]) -> Result<Container, ContainerError> {
        let mut bytes = REAL.to_vec();
        for (at, new) in changes {
            bytes[*at..at + new.len()].copy_from_slice(new);
        }
        Container::parse(&bytes)
    }

    #[track_caller]
    fn refused(changes: &[(usize, &[u8])], message: &str) {
        let text = with(changes).unwrap_err().to_string();
        assert!(text.contains(message), "{text}");
    }

    /// The metadata with `from` replaced by `to`, which has the same length.
    #[track_caller]
    fn refused_metadata(from: &str, to: &str, message: &str) {
        assert_eq!(from.len(), to.len());
        let at = REAL.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        refused(&[(at, to.as_bytes())], message);
    }

    #[test]
    fn what_xclbinutil_writes_is_accepted() {
        let expected = Container { columns: 2, start_columns: vec![1], kernel_id: 0x901 };
        assert_eq!(Container::parse(REAL), Ok(expected));
        let (partition, _) = section(AIE_PARTITION);
        for columns in 1..=4u8 {
            assert_eq!(with(&[(partition + 32, &[columns])]).unwrap().columns, u32::from(columns));
        }
    }

    #[test]
    fn a_container_ends_nowhere_else() {
        for length in 0..REAL.len() {
            assert!(Container::parse(&REAL[..length]).is_err(), "{length} bytes");
        }
        let longer = [REAL, &[0]].concat();
        assert!(Container::parse(&longer).is_err());
    }

    #[test]
    fn headers_are_checked() {
        refused(&[(6, b"3")], "byte 0 of the container: \"xclbin3\\x00\"; xclbin2");
        refused(&[(LENGTH, &[1])], "byte 304 of the container: a length of");
        refused(&[(SECTIONS, &0u32.to_le_bytes())], "0 sections; 1 to 64");
        refused(&[(SECTIONS, &u32::MAX.to_le_bytes())], "4294967295 sections");
        refused(&[(SECTIONS, &64u32.to_le_bytes())], "of kind");
        let (_, header) = section(IP_LAYOUT);
        refused(&[(header + 24, &u64::MAX.to_le_bytes())], "has 88 bytes at 18446744073709551615");
        refused(&[(header + 32, &u64::MAX.to_le_bytes())], "has 18446744073709551615 bytes at");
        // A section that overlaps the table, and one that overlaps another section.
        refused(&[(header + 24, &456u64.to_le_bytes())], "a place from 736 to");
        let (partition, _) = section(AIE_PARTITION);
        let on_it = (partition as u64 + 8).to_le_bytes();
        refused(&[(header + 24, &on_it)], "a byte to be of one section");
        // A required kind of section is missing, or is there twice.
        refused(&[(header, &[99])], "no section IP_LAYOUT");
        let (_, connectivity) = section(7);
        refused(&[(connectivity, &[8])], "a second section IP_LAYOUT");
    }

    #[test]
    fn the_partition_is_checked() {
        let (at, _) = section(AIE_PARTITION);
        refused(&[(at + 32, &[0])], "a partition of 0 columns; 1 to 4");
        refused(&[(at + 32, &[5])], "a partition of 5 columns; 1 to 4");
        refused(&[(at + 32, &[0, 1])], "a partition of 256 columns");
        let file = Span { bytes: REAL, start: 0 };
        let starts = at + file.u32(at + 44, "").unwrap() as usize;
        refused(&[(starts, &[4])], "2 columns from column 4; columns below 5");
        refused(&[(at + 40, &[0])], "0 columns to start at; 1 to 5");
        refused(&[(at + 44, &[0xff; 4])], "columns to start at has 2 bytes at 4294967295");
        refused(&[(at + 120, &[0])], "0 PDIs; 1 to 16");
        refused(&[(at + 120, &[0xff; 4])], "4294967295 PDIs");
        refused(&[(at + 124, &[0xff; 4])], "PDIs has 96 bytes at 4294967295");
        let pdi = at + file.u32(at + 124, "").unwrap() as usize;
        refused(&[(pdi + 16, &[0; 4])], "a PDI without an image");
        refused(&[(pdi + 16, &[0xff; 4])], "a PDI's image has 4294967295 bytes");
        refused(&[(pdi + 24, &[0])], "0 groups of a PDI");
        refused(&[(pdi + 28, &[0xff; 4])], "groups of a PDI has 96 bytes");
        let group = at + file.u32(pdi + 28, "").unwrap() as usize;
        refused(&[(group + 16, &[0])], "0 kernels of a PDI");
        refused(&[(group + 20, &[0xff; 4])], "kernels of a PDI has 8 bytes");
        let id = at + file.u32(group + 20, "").unwrap() as usize;
        refused(&[(id, &[2])], "PDIs for kernels [902]; one for 901");
    }

    #[test]
    fn the_kernel_and_its_arguments_are_checked() {
        let (at, _) = section(IP_LAYOUT);
        refused(&[(at, &[2])], "2 instances of kernels; 1");
        refused(&[(at + 8, &[1])], "an instance of type 1");
        refused(&[(at + 8 + 16, b"OTHERAIE")], "an instance of the kernel \"OTHERAIE\"; MLIR_AIE");
        refused_metadata("kernel name=\"MLIR_AIE", "kernel name=\"MLIR\nAIE", "kernel 1 \"MLIR\\nAIE\"");
        refused_metadata("</kernel>\n", "<kernel/>\n", "kernel 2 \"\"");
        refused_metadata("<kernel name", "<hernel name", "0 kernels with 0 arguments");
        refused_metadata(
            "<arg name=\"bo4\"",
            "<are name=\"bo4\"",
            "1 kernels with 7 arguments; one kernel MLIR_AIE with 8",
        );
        refused_metadata(
            "<arg name=\"bo0\"",
            "<are name=\"bo0\"",
            "argument 3 has id 4 and address qualifier 1; 3 and 1",
        );
        refused_metadata(
            "addressQualifier=\"0\" id=\"2\"",
            "addressQualifier=\"1\" id=\"2\"",
            "argument 2 has id 2 and address qualifier 1; 2 and 0",
        );
        refused_metadata("id=\"7\"", "if=\"7\"", "argument 7 has id none and address qualifier 1; 7 and 1");
        // A quote that is never closed swallows the rest.
        refused_metadata("language=\"c\"", "language= c\"", "a tag without an end");
    }
}
