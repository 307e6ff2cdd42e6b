//! Checks that a model is in GPU memory: compares the memory that the Linux kernel reports for this process with the
//! bytes that were placed.
//!
//! Each open file of a DRM device has a text under `/proc/self/fdinfo`
//! (<https://docs.kernel.org/gpu/drm-usage-stats.html>), in which amdgpu reports the VRAM and GTT of this process's
//! buffers. (`mem_info_vram_used` in sysfs includes the buffers of other processes.) On an integrated GPU the driver
//! may move buffers between VRAM and GTT, so only the sum is compared.
//!
//! The result is [`Residency::Unknown`] if the driver reports nothing or no file of the device is found.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use crate::config::show_bytes;

/// The most bytes of an fdinfo text that are read. A usual text has a few KB.
const MAX_TEXT_BYTES: u64 = 64 << 10;
/// The reported memory may be less than the placed bytes by a hundredth, or by 4 MiB if that is more: the kernel rounds
/// numbers to KiB, and the driver may have freed some of its own buffers meanwhile.
const MISSING_SHARE: u64 = 100;
const MISSING_BYTES: u64 = 4 << 20;
/// The reported memory may exceed the placed bytes by a hundredth plus 256 MiB: for page tables (8 bytes for each 4
/// KiB) and rounding to pages, and for the driver's own buffers, such as pipelines and command buffers.
const EXTRA_SHARE: u64 = 100;
const EXTRA_BYTES: u64 = 256 << 20;

/// One open DRM file, as its fdinfo text describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// The driver's name, e.g. `amdgpu`.
    pub driver: String,
    /// The device's PCI address, e.g. `0000:c5:00.0`.
    pub pdev: Option<String>,
    /// The id of the DRM client. Files with equal ids report the same memory.
    pub client_id: Option<u64>,
    /// The memory that the file reports. `None`: the text has no memory keys.
    pub used: Option<MemoryUse>,
}

/// GPU memory of a process, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub vram: u64,
    pub gtt: u64,
}

impl MemoryUse {
    pub fn sum(self) -> u64 {
        self.vram.saturating_add(self.gtt)
    }
}

/// Parses an fdinfo text. `None`: the file does not belong to a DRM device.
pub fn parse(text: &str) -> Option<Client> {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let keys: BTreeMap<&str, &str> = lines.map(|(key, value)| (key.trim(), value.trim())).collect();
    let bytes = |region: &str| {
        // `drm-resident` counts only resident pages. amdgpu's older key `drm-memory` also counts evicted buffers on
        // some kernels, so the newer key is preferred.
        ["drm-resident-", "drm-memory-"].iter().find_map(|key| size(keys.get(&*format!("{key}{region}"))?))
    };
    Some(Client {
        driver: (*keys.get("drm-driver")?).to_owned(),
        pdev: keys.get("drm-pdev").map(|pdev| pdev.to_ascii_lowercase()),
        client_id: keys.get("drm-client-id").and_then(|id| id.parse().ok()),
        // A device without its own memory may omit the VRAM key.
        used: match (bytes("vram"), bytes("gtt")) {
            (None, None) => None,
            (vram, gtt) => Some(MemoryUse { vram: vram.unwrap_or(0), gtt: gtt.unwrap_or(0) }),
        },
    })
}

/// Parses a size with a unit. A number without a unit means bytes.
fn size(text: &&str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    let unit = match words.next() {
        None => 1,
        Some("KiB") => 1 << 10,
        Some("MiB") => 1 << 20,
        Some(_) => return None,
    };
    number.checked_mul(unit).filter(|_| words.next().is_none())
}

/// The memory of the amdgpu device at PCI address `pdev` that a process uses. `process` is its folder in `/proc`.
/// `None`: no open file reports it.
pub fn memory_use(process: &Path, pdev: &str) -> Option<MemoryUse> {
    let mut clients = BTreeMap::new();
    // A file that was closed meanwhile, or that this process may not read, is skipped.
    for entry in std::fs::read_dir(process.join("fdinfo")).ok()?.filter_map(Result::ok) {
        let Ok(file) = std::fs::File::open(entry.path()) else { continue };
        let mut text = String::new();
        if file.take(MAX_TEXT_BYTES).read_to_string(&mut text).is_err() {
            continue;
        }
        if let Some(Client { driver, pdev: Some(at), client_id, used: Some(used) }) = parse(&text)
            && driver == "amdgpu"
            && at == pdev.to_ascii_lowercase()
        {
            clients.insert(client_id, used);
        }
    }
    let add = |a: MemoryUse, b: MemoryUse| MemoryUse {
        vram: a.vram.saturating_add(b.vram),
        gtt: a.gtt.saturating_add(b.gtt),
    };
    clients.into_values().reduce(add)
}

/// Whether the kernel reports the memory that was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// The driver reports nothing.
    Unknown,
    /// The reported memory matches. `used` is the growth since the device was opened.
    Confirmed { placed: u64, used: MemoryUse },
    /// The kernel reports too few or too many bytes.
    Denied { placed: u64, used: MemoryUse },
}

/// Compares the placed bytes with the process's memory use `before` and `after`.
pub fn compare(placed: u64, before: Option<MemoryUse>, after: Option<MemoryUse>) -> Residency {
    let Some(after) = after else { return Residency::Unknown };
    let before = before.unwrap_or_default();
    // VRAM may have shrunk while GTT grew, or the reverse: the driver moves buffers between them.
    let grown = after.sum().saturating_sub(before.sum());
    let missing = (placed / MISSING_SHARE).max(MISSING_BYTES);
    let extra = placed / EXTRA_SHARE + EXTRA_BYTES;
    let vram = after.vram.saturating_sub(before.vram).min(grown);
    let used = MemoryUse { vram, gtt: grown - vram };
    if grown.saturating_add(missing) >= placed && grown <= placed.saturating_add(extra) {
        Residency::Confirmed { placed, used }
    } else {
        Residency::Denied { placed, used }
    }
}

impl std::fmt::Display for Residency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Residency::Unknown => f.write_str(
                "the use of GPU memory cannot be verified here: only amdgpu on Linux reports it (drm-memory-* in \
                 /proc/self/fdinfo)",
            ),
            Residency::Confirmed { placed, used } | Residency::Denied { placed, used } => {
                let [placed, sum, vram, gtt] = [*placed, used.sum(), used.vram, used.gtt].map(show_bytes);
                write!(
                    f,
                    "{placed} were placed, and the kernel sees {sum} of this process: {vram} in VRAM, {gtt} in GTT"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    /// A text of Linux 6.1, with amdgpu's own keys.
    const OLD: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t529\ndrm-driver:\tamdgpu\npasid:\t32777\n\
        drm-pdev:\t0000:c5:00.0\ndrm-client-id:\t42\ndrm-memory-vram:\t16777216 KiB\ndrm-memory-gtt: \t10485760 KiB\n\
        drm-memory-cpu: \t0 KiB\ndrm-engine-gfx:\t27365839120 ns\ndrm-engine-compute:\t7 ns\n";
    /// A text of Linux 6.8, with keys for evicted and requested memory.
    const MIDDLE: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t1239\ndrm-driver:\tamdgpu\ndrm-client-id:\t4\n\
        drm-pdev:\t0000:c5:00.0\npasid:\t32771\ndrm-memory-vram:\t44564 KiB\ndrm-memory-gtt: \t2392 KiB\n\
        drm-memory-cpu: \t0 KiB\namd-memory-visible-vram:\t44564 KiB\namd-evicted-vram:\t0 KiB\n\
        amd-evicted-visible-vram:\t0 KiB\namd-requested-vram:\t44564 KiB\namd-requested-visible-vram:\t11952 KiB\n\
        amd-requested-gtt:\t2392 KiB\ndrm-shared-vram:\t0 KiB\ndrm-shared-gtt:\t0 KiB\ndrm-shared-cpu:\t0 KiB\n";
    /// A text of Linux 6.14. It has the common DRM keys, printed in the largest unit that divides the number, and
    /// amdgpu's own keys, which here include evicted memory.
    const NEW: &str = "pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t1239\ndrm-driver:\tamdgpu\ndrm-client-id:\t9\n\
        drm-pdev:\t0000:C5:00.0\npasid:\t32771\ndrm-total-cpu:\t0\ndrm-shared-cpu:\t0\ndrm-resident-cpu:\t0\n\
        drm-purgeable-cpu:\t0\ndrm-total-gtt:\t10 MiB\ndrm-shared-gtt:\t0\ndrm-resident-gtt:\t10 MiB\n\
        drm-purgeable-gtt:\t0\ndrm-total-vram:\t117088 KiB\ndrm-shared-vram:\t31952 KiB\ndrm-resident-vram:\t180 KiB\n\
        drm-purgeable-vram:\t0\ndrm-memory-vram:\t117088 KiB\ndrm-memory-gtt: \t10240 KiB\ndrm-memory-cpu: \t0 KiB\n\
        amd-evicted-vram:\t116908 KiB\namd-requested-vram:\t117088 KiB\namd-requested-gtt:\t10240 KiB\n";
    /// A text of a driver without memory keys, and a text of a file that is not a device.
    const OTHER: &str = "pos:\t0\ndrm-driver:\ti915\ndrm-pdev:\t0000:00:02.0\ndrm-client-id:\t7\n";
    const PLAIN: &str = "pos:\t0\nflags:\t0100002\nmnt_id:\t15\nino:\t1057\n";

    fn memory_use_of(text: &str) -> Option<MemoryUse> {
        parse(text).expect("a DRM file").used
    }

    #[test]
    fn texts_of_several_kernel_versions_are_parsed() {
        let old = parse(OLD).unwrap();
        assert_eq!(
            (old.driver.as_str(), old.pdev.as_deref(), old.client_id),
            ("amdgpu", Some("0000:c5:00.0"), Some(42))
        );
        assert_eq!(old.used, Some(MemoryUse { vram: 16 * GIB, gtt: 10 * GIB }));
        assert_eq!(memory_use_of(MIDDLE), Some(MemoryUse { vram: 44564 << 10, gtt: 2392 << 10 }));
        assert_eq!(memory_use_of(NEW), Some(MemoryUse { vram: 180 << 10, gtt: 10 * MIB }));
        assert_eq!(memory_use_of(OTHER), None);
        assert_eq!(parse(PLAIN), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn invalid_sizes_are_ignored() {
        for bad in ["", "x KiB", "1 XiB", "1 KiB more", "18446744073709551615 MiB", "-1 KiB"] {
            let text = format!("drm-driver:\tamdgpu\ndrm-memory-vram:\t{bad}\n");
            assert_eq!(memory_use_of(&text), None, "{bad:?}");
        }
        assert_eq!(
            memory_use_of("drm-driver: amdgpu\ndrm-memory-gtt: 4096\n"),
            Some(MemoryUse { vram: 0, gtt: 4096 })
        );
    }

    #[test]
    fn files_of_one_client_count_once_and_other_devices_do_not_count() {
        let process = tempfile::tempdir().unwrap();
        let folder = process.path().join("fdinfo");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(memory_use(process.path(), "0000:c5:00.0"), None, "no file at all");
        let write = |fd: u32, text: &str| std::fs::write(folder.join(fd.to_string()), text).unwrap();
        write(0, PLAIN);
        write(3, OTHER);
        assert_eq!(memory_use(process.path(), "0000:c5:00.0"), None, "no file of the device");
        write(4, MIDDLE);
        write(5, MIDDLE);
        let one = MemoryUse { vram: 44564 << 10, gtt: 2392 << 10 };
        assert_eq!(memory_use(process.path(), "0000:c5:00.0"), Some(one));
        write(6, &MIDDLE.replace("drm-client-id:\t4", "drm-client-id:\t5"));
        write(
            7,
            &MIDDLE.replace("0000:c5:00.0", "0000:03:00.0").replace("drm-client-id:\t4", "drm-client-id:\t6"),
        );
        assert_eq!(
            memory_use(process.path(), "0000:C5:00.0"),
            Some(MemoryUse { vram: 2 * one.vram, gtt: 2 * one.gtt })
        );
        assert_eq!(memory_use(&process.path().join("gone"), "0000:c5:00.0"), None);
    }

    #[test]
    fn only_the_sum_of_vram_and_gtt_is_compared() {
        let (placed, before) = (16 * GIB, Some(MemoryUse { vram: 40 * MIB, gtt: 8 * MIB }));
        let after = |vram, gtt| Some(MemoryUse { vram, gtt });
        let confirmed = |after| matches!(compare(placed, before, after), Residency::Confirmed { .. });
        assert!(confirmed(after(16 * GIB + 40 * MIB, 8 * MIB)));
        assert!(confirmed(after(GIB, 15 * GIB + 48 * MIB)), "moved to GTT");
        assert!(confirmed(after(0, 16 * GIB + 48 * MIB)), "moved completely");
        assert!(confirmed(after(16 * GIB, 300 * MIB)), "with the driver's own buffers");
        assert!(!confirmed(after(15 * GIB, 100 * MIB)), "a sixteenth is missing");
        assert!(!confirmed(after(17 * GIB, GIB)), "more than was placed");
        assert!(!confirmed(before), "nothing is there");
        assert_eq!(compare(placed, before, None), Residency::Unknown);
        // A load that left the device empty must not count as loaded.
        let empty = compare(26 * GIB, before, before);
        assert_eq!(
            empty.to_string(),
            "26.0 GiB were placed, and the kernel sees 0 B of this process: 0 B in VRAM, 0 B in GTT"
        );
    }
}
