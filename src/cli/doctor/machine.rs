//! The machine as its files describe it: `/sys`, `/proc`, `/dev`, `/etc`, `/usr`, `/lib` and `/opt`, below a root that
//! may be another folder.
//!
//! This module only reads: it writes, loads and starts nothing. Every read has a size limit. The contents of the files
//! are not trusted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::finding::{Finding, RemedyKind};
use crate::device::status_field;

/// Maximum bytes read from a file. The files read here have a few lines.
const FILE_BYTES: u64 = 256 << 10;
/// Maximum bytes read from the kernel log, whose buffer has some hundred KiB.
const LOG_BYTES: usize = 4 << 20;
/// Maximum entries read from a folder.
const ENTRIES: usize = 4096;
/// Folders that the dynamic linker of a 64-bit x86 system searches, and XRT's own.
const LIBRARY_FOLDERS: [&str; 9] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "lib",
    "usr/local/lib/x86_64-linux-gnu",
    "usr/local/lib",
    "opt/xilinx/xrt/lib",
];

/// A device on the PCI bus.
#[derive(Debug, Clone)]
pub struct Pci {
    /// The folder of the device, relative to the root.
    pub folder: String,
    pub address: String,
    pub vendor: u64,
    pub device: u64,
    pub class: u64,
    /// The kernel driver that the device is bound to.
    pub driver: Option<String>,
}

/// A device node that cannot be opened.
#[derive(Debug)]
pub struct NodeError {
    pub error: io::Error,
    /// The group that the node belongs to.
    pub group: Option<String>,
    /// Whether the user was added to the group after the login of this session.
    pub joined_later: bool,
}

/// A package that distributions name differently.
#[derive(Debug, Clone, Copy)]
pub enum Package {
    VulkanLoader,
    Radv,
    /// Mesa, version [`super::vulkan::MIN_MESA`] or later.
    NewerRadv,
    Xrt,
}

#[derive(Debug)]
pub struct Machine {
    root: PathBuf,
    redirected: bool,
}

impl Machine {
    pub fn new(root: Option<&Path>) -> Machine {
        Machine { root: root.unwrap_or(Path::new("/")).to_owned(), redirected: root.is_some() }
    }

    pub fn is_redirected(&self) -> bool {
        self.redirected
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a file, without leading and trailing white space. Bytes that are not UTF-8 are replaced.
    pub fn read(&self, path: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.open(path)?.take(FILE_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Reads a file that holds one number, decimal or hexadecimal.
    pub fn number(&self, path: &str) -> io::Result<u64> {
        let text = self.read(path)?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        number.map_err(|_| {
            let start: String = text.chars().take(40).collect();
            io::Error::new(io::ErrorKind::InvalidData, format!("{start:?} is not a number"))
        })
    }

    /// The first `N` bytes of a file.
    pub fn head<const N: usize>(&self, path: &str) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.open(path)?.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Names of a folder's entries that begin with `prefix`, sorted; empty if there is no such folder.
    pub fn names(&self, folder: &str, prefix: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(folder)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(ENTRIES)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with(prefix))
            .collect();
        names.sort();
        names
    }

    /// The last part of a symbolic link's target.
    fn link(&self, path: &str) -> Option<String> {
        fs::read_link(self.path(path)).ok()?.file_name()?.to_str().map(str::to_owned)
    }

    /// Opens a file without blocking, even if the path is a pipe.
    pub fn open(&self, path: &str) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.path(path))
    }

    /// Every device on the PCI bus.
    pub fn pci(&self) -> Vec<Pci> {
        const FOLDER: &str = "sys/bus/pci/devices";
        let read = |address: String| {
            let folder = format!("{FOLDER}/{address}");
            let number = |name: &str| self.number(&format!("{folder}/{name}")).ok();
            let (vendor, device, class) = (number("vendor")?, number("device")?, number("class")?);
            let driver = self.link(&format!("{folder}/driver"));
            Some(Pci { folder, address, vendor, device, class, driver })
        };
        self.names(FOLDER, "").into_iter().filter_map(read).collect()
    }

    /// The parameters that the kernel was started with.
    pub fn kernel_parameters(&self) -> Vec<String> {
        let line = self.read("proc/cmdline").unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// The value of a kernel parameter. If it is given several times, the last value counts.
    pub fn kernel_parameter(&self, name: &str) -> Option<String> {
        let parameters = self.kernel_parameters();
        let mut values =
            parameters.iter().filter_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='));
        values.next_back().map(str::to_owned)
    }

    /// Major and minor version of the kernel.
    pub fn kernel_version(&self) -> Option<(u32, u32)> {
        version(&self.read("proc/sys/kernel/osrelease").ok()?)
    }

    /// A line of `/proc/meminfo`, in bytes.
    pub fn memory(&self, name: &str) -> Option<u64> {
        status_field(&self.read("proc/meminfo").ok()?, name)?.checked_mul(1024)
    }

    /// A line of `/etc/os-release`.
    pub fn system(&self, name: &str) -> Option<String> {
        let text = self.read("etc/os-release").or_else(|_| self.read("usr/lib/os-release")).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some(value.trim_matches('"').to_owned())
    }

    /// The messages of the kernel log, the oldest first. On most systems only root may read them.
    pub fn kernel_log(&self) -> io::Result<Vec<String>> {
        let mut file = self.open("dev/kmsg")?;
        let (mut bytes, mut record) = (Vec::new(), vec![0; 64 << 10]);
        // A read of the real file returns one record, and an error after the last one.
        while bytes.len() < LOG_BYTES {
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(&record[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The kernel has overwritten the next record. The next read returns the record after it.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) => return Err(error),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.lines().filter_map(|line| Some(line.split_once(';')?.1.to_owned())).collect())
    }

    /// The paths of the libraries whose file names begin with `prefix`.
    pub fn libraries(&self, prefix: &str) -> Vec<String> {
        let in_folder = |folder: &&str| {
            let names = self.names(folder, prefix).into_iter();
            names.map(|name| format!("{folder}/{name}")).collect::<Vec<_>>()
        };
        LIBRARY_FOLDERS.iter().flat_map(in_folder).collect()
    }

    /// Opens a device node for reading and writing. Below another root, the owner of the file is the user that created
    /// the copy. There, the node counts as owned by the group `render`, as udev sets it.
    pub fn may_open(&self, node: &str) -> Result<(), NodeError> {
        let (opened, gid) = if self.redirected {
            let gid = self.gid("render");
            let may = self.uid() == Some(0) || gid.is_some_and(|gid| self.gids().contains(&gid));
            (if may { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }, gid)
        } else {
            let path = self.path(node);
            let gid = fs::metadata(&path).ok().map(|metadata| metadata.gid().into());
            (OpenOptions::new().read(true).write(true).open(path).map(drop), gid)
        };
        opened.map_err(|error| {
            let group = gid.and_then(|gid| self.group(gid));
            let joined_later = group.as_ref().is_some_and(|group| self.joined_later(group));
            NodeError { error, group, joined_later }
        })
    }

    fn uid(&self) -> Option<u64> {
        status_field(&self.read("proc/self/status").ok()?, "Uid")
    }

    /// The group ids of this process.
    fn gids(&self) -> Vec<u64> {
        let status = self.read("proc/self/status").unwrap_or_default();
        let lines =
            status.lines().filter_map(|line| line.strip_prefix("Groups:").or(line.strip_prefix("Gid:")));
        lines.flat_map(str::split_whitespace).filter_map(|gid| gid.parse().ok()).collect()
    }

    /// The lines of `/etc/passwd` or `/etc/group`, split at their colons.
    fn accounts(&self, path: &str) -> Vec<Vec<String>> {
        let text = self.read(path).unwrap_or_default();
        text.lines().map(|line| line.split(':').map(str::to_owned).collect()).collect()
    }

    fn gid(&self, group: &str) -> Option<u64> {
        let groups = self.accounts("etc/group");
        groups.iter().find(|fields| fields[0] == group)?.get(2)?.parse().ok()
    }

    fn group(&self, gid: u64) -> Option<String> {
        let gid = gid.to_string();
        self.accounts("etc/group").into_iter().find(|fields| fields.get(2) == Some(&gid))?.into_iter().next()
    }

    /// Whether the user is in the group according to `/etc/group`, but this process is not.
    fn joined_later(&self, group: &str) -> bool {
        let found = || {
            let uid = self.uid()?.to_string();
            let users = self.accounts("etc/passwd");
            let user = users.iter().find(|fields| fields.get(2) == Some(&uid))?.first()?;
            let groups = self.accounts("etc/group");
            let members = groups.iter().find(|fields| fields[0] == group)?.get(3)?;
            Some(members.split(',').any(|member| member == user) && !self.gids().contains(&self.gid(group)?))
        };
        found().unwrap_or(false)
    }

    /// Adds the command that installs a package on this distribution, or names the package.
    pub fn install(&self, finding: Finding, package: Package) -> Finding {
        let ids = [self.system("ID"), self.system("ID_LIKE")].map(Option::unwrap_or_default).join(" ");
        let is = |id: &str| ids.split_whitespace().any(|word| word == id);
        let [debian, fedora, arch] = match package {
            Package::VulkanLoader => ["libvulkan1", "vulkan-loader", "vulkan-icd-loader"],
            Package::Radv | Package::NewerRadv => {
                ["mesa-vulkan-drivers", "mesa-vulkan-drivers", "vulkan-radeon"]
            }
            Package::Xrt => ["libxrt2 libxrt-npu2", "xrt", "xrt xrt-plugin-amdxdna"],
        };
        let is_bookworm = self.system("VERSION_CODENAME").as_deref() == Some("bookworm");
        match package {
            Package::NewerRadv if is("debian") && is_bookworm => {
                finding.command(format!("sudo apt install -t bookworm-backports {debian}"))
            }
            Package::NewerRadv if is("debian") || is("ubuntu") => {
                finding.act("use a release of the distribution that has Mesa 24 or later")
            }
            _ if is("debian") || is("ubuntu") => finding.command(format!("sudo apt install {debian}")),
            Package::NewerRadv if is("fedora") => finding.command(format!("sudo dnf upgrade {fedora}")),
            _ if is("fedora") => finding.command(format!("sudo dnf install {fedora}")),
            Package::NewerRadv if is("arch") => finding.command("sudo pacman -Syu"),
            _ if is("arch") => finding.command(format!("sudo pacman -S {arch}")),
            _ => {
                finding.act(&format!("install the newest version of the package that Debian calls {debian}"))
            }
        }
    }

    /// Adds a kernel parameter to set, and how to set it on this distribution.
    pub fn add_parameter(&self, finding: Finding, parameter: String) -> Finding {
        let line = self.parameter_line("--args", "add", &parameter);
        finding.remedy(RemedyKind::KernelParameter, parameter, line)
    }

    /// Adds a kernel parameter to remove, and how to remove it on this distribution.
    pub fn remove_parameter(&self, finding: Finding, parameter: String) -> Finding {
        let line = self.parameter_line("--remove-args", "remove", &parameter);
        finding.remedy(RemedyKind::KernelParameterRemoved, parameter, line)
    }

    fn parameter_line(&self, grubby: &str, verb: &str, parameter: &str) -> String {
        match self.system("ID").as_deref() {
            Some("fedora") => {
                format!("sudo grubby --update-kernel=ALL {grubby}=\"{}\"", shell_word(parameter))
            }
            _ => format!("# kernel parameter to {verb}: {parameter} (docs/doctor.md says how)"),
        }
    }
}

/// The word without the characters that need quoting inside `"`.
fn shell_word(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_alphanumeric() || "._=,:-".contains(*c)).collect()
}

/// Major and minor number of a version such as `6.14.0-24-generic`.
pub fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
