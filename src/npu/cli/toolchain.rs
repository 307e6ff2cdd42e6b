//! The tools that build a kernel: where they are on this machine, their versions, and how to install missing ones.
//!
//! No Linux distribution contains them: mlir-aie and Peano are Python packages on their projects' release pages, and
//! `xclbinutil` is part of XRT.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::tool::Run;
use crate::cli::args::BuildKernels;
use crate::cli::error::Error;
use crate::cli::log;

/// Time limit for a tool to print its version. Python may have to read its packages from a cold disk.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

const GET_MLIR_AIE: &str = "python3 -m pip install mlir_aie -f \
     https://github.com/Xilinx/mlir-aie/releases/expanded_assets/latest-wheels-2";
const GET_PEANO: &str =
    "python3 -m pip install llvm-aie -f https://github.com/Xilinx/llvm-aie/releases/expanded_assets/nightly";

/// The first year whose mlir-aie writes instructions in the format that this program reads. Since 2026, its versions
/// have no date.
const MLIR_AIE_YEAR: u32 = 2025;
/// The first XRT with which mlir-aie's own instructions build containers for an NPU.
const XRT: [u32; 2] = [2, 18];

/// Prints where Python has mlir-aie and Peano. mlir-aie is in a folder with `bin`, `include`, `lib` and `python/aie`.
const PROBE: &str = r#"
import importlib.metadata, importlib.util, json, os
def package(name, folder):
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None, None
    return found.version, str(found.locate_file(folder))
mlir_aie, root = package("mlir_aie", "mlir_aie")
peano_package, peano = package("llvm-aie", "llvm-aie")
spec = importlib.util.find_spec("aie")
if spec is not None and spec.submodule_search_locations:
    root = os.path.dirname(os.path.dirname(list(spec.submodule_search_locations)[0]))
print(json.dumps({"mlir_aie": mlir_aie, "root": root, "peano": peano}))
"#;

#[derive(Debug, Default, Deserialize)]
struct Probed {
    /// The version; `None` if mlir-aie was built from its source.
    mlir_aie: Option<String>,
    root: Option<PathBuf>,
    peano: Option<PathBuf>,
}

/// The tools, all of which were found.
pub struct Toolchain {
    python: PathBuf,
    aiecc: PathBuf,
    /// The folder of mlir-aie.
    root: PathBuf,
    /// The folder of Peano.
    pub peano: PathBuf,
    xclbinutil: PathBuf,
    /// A name and a version of each tool.
    pub versions: Vec<String>,
}

/// The result of the search for a tool: its version and path, or what is missing and what to do.
type Found = Result<(String, PathBuf), String>;

impl Toolchain {
    /// Searches for the tools, and reports what it finds. `work` is a folder for the tools' output.
    pub fn find(args: &BuildKernels, work: &Path) -> Result<Toolchain, Error> {
        let python = args.python.clone().map_or("python3".into(), |python| from_anywhere(&python));
        let probed = probe(&python, work);
        let none = Probed::default();
        let places = probed.as_ref().unwrap_or(&none);
        let mlir_aie = probed.as_ref().map_err(String::clone).and_then(|probed| mlir_aie(&python, probed));
        let peano = args.peano.clone().or_else(|| std::env::var_os("PEANO_INSTALL_DIR").map(PathBuf::from));
        let peano = peano.map(|peano| std::path::absolute(&peano).unwrap_or(peano));
        let peano = peano_at(peano.or_else(|| places.peano.clone()), work);
        let xclbinutil = xclbinutil(work);
        let found = [("mlir-aie", &mlir_aie), ("Peano", &peano), ("xclbinutil", &xclbinutil)];
        for (name, found) in found {
            match found {
                Ok((version, place)) => log::say(format_args!("{name:<10}  {version}, {}", place.display())),
                Err(problem) => log::say(format_args!("{name:<10}  {problem}")),
            }
        }
        let lacking: Vec<&str> =
            found.iter().filter(|(_, found)| found.is_err()).map(|(name, _)| *name).collect();
        let versions = found.iter().filter_map(|(name, found)| {
            let (version, _) = found.as_ref().ok()?;
            Some(format!("{name} {version}"))
        });
        let versions = versions.collect();
        let (Ok((_, aiecc)), Ok((_, peano)), Ok((_, xclbinutil)), Some(root)) =
            (mlir_aie, peano, xclbinutil, places.root.clone())
        else {
            return Err(Error::Tool {
                tool: "the NPU's toolchain".into(),
                problem: format!(
                    "no {} that can be used; the lines above say what to install",
                    lacking.join(", no ")
                ),
            });
        };
        Ok(Toolchain { python, aiecc, root, peano, xclbinutil, versions })
    }

    /// Runs a script.
    pub fn python(&self, script: &str) -> Command {
        let mut command = self.command(&self.python);
        command.arg(script);
        command
    }

    /// Runs mlir-aie's driver.
    pub fn aiecc(&self) -> Command {
        if self.aiecc.extension().is_some_and(|ending| ending == "py") {
            let mut command = self.command(&self.python);
            command.arg(&self.aiecc);
            command
        } else {
            self.command(&self.aiecc)
        }
    }

    /// Runs Peano's compiler with the include path of aie_api.
    pub fn clang(&self) -> Command {
        let mut command = self.command(&self.peano.join("bin/clang++"));
        command.arg("-I").arg(self.root.join("include"));
        command
    }

    /// A command in the environment that mlir-aie's `env_setup.sh` creates.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("PATH", before("PATH", [self.root.join("bin"), parent(&self.xclbinutil)]));
        command.env("PYTHONPATH", before("PYTHONPATH", [self.root.join("python")]));
        command.env("LD_LIBRARY_PATH", before("LD_LIBRARY_PATH", [self.root.join("lib")]));
        command.env("PEANO_INSTALL_DIR", &self.peano).env("MLIR_AIE_INSTALL_DIR", &self.root);
        command
    }
}

/// A program that runs in another working directory. A name without a folder is searched for in PATH.
fn from_anywhere(program: &Path) -> PathBuf {
    let has_folder = program.components().nth(1).is_some();
    let absolute = if has_folder { std::path::absolute(program).ok() } else { None };
    absolute.unwrap_or_else(|| program.to_owned())
}

fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).to_owned()
}

/// The folders of a variable, after these folders.
fn before<const N: usize>(variable: &str, folders: [PathBuf; N]) -> OsString {
    let old = std::env::var_os(variable).unwrap_or_default();
    let old = std::env::split_paths(&old).filter(|path| !path.as_os_str().is_empty());
    // A folder with a colon in its name cannot be named in the variable.
    std::env::join_paths(folders.into_iter().chain(old)).unwrap_or_default()
}

/// The output of a tool, or the reason why it fails.
fn printed(command: &mut Command, work: &Path) -> Result<String, String> {
    let (output, log) = (work.join("output"), work.join("log"));
    let run = Run { name: "", limit: PROBE_LIMIT, log: &log };
    run.end_of(command, Some(&output))?;
    std::fs::read_to_string(&output).map_err(|error| format!("prints no text: {error}"))
}

fn probe(python: &Path, work: &Path) -> Result<Probed, String> {
    let text = printed(Command::new(python).args(["-c", PROBE]), work).map_err(|problem| {
        format!("not looked for: Python {problem}; name another with --python: {}", python.display())
    })?;
    serde_json::from_str(text.lines().last().unwrap_or_default())
        .map_err(|error| format!("not looked for: {} answers no JSON: {error}", python.display()))
}

fn mlir_aie(python: &Path, probed: &Probed) -> Found {
    let Some(root) = &probed.root else {
        return Err(format!("{} has no mlir-aie: `{GET_MLIR_AIE}`", python.display()));
    };
    let version = probed.mlir_aie.as_deref().unwrap_or("of unknown version");
    if !mlir_aie_is_new(version) {
        return Err(format!("{version} is too old, {MLIR_AIE_YEAR} or newer is needed: `{GET_MLIR_AIE}`"));
    }
    if !root.join("include/aie_api/aie.hpp").exists() {
        let lacks = "has no include/aie_api/aie.hpp";
        return Err(format!("{version} in {} {lacks}; install it again: `{GET_MLIR_AIE}`", root.display()));
    }
    let bins = [Some(root.join("bin")), python.is_absolute().then(|| parent(python))];
    let aiecc = ["aiecc.py", "aiecc"].iter().find_map(|name| {
        let here = bins.iter().flatten().map(|bin| bin.join(name)).find(|path| path.is_file());
        here.or_else(|| in_path(name))
    });
    match aiecc {
        Some(aiecc) => Ok((version.to_owned(), aiecc)),
        None => Err(format!("{version} in {} has no bin/aiecc.py: `{GET_MLIR_AIE}`", root.display())),
    }
}

/// Whether a version is not known to be too old: 0.0.1.2025042204+b6af6f5 has a date, 1.1.0 has none.
fn mlir_aie_is_new(version: &str) -> bool {
    match version.strip_prefix("0.0.1.") {
        Some(date) => {
            date.get(..4).and_then(|year| year.parse().ok()).is_some_and(|year: u32| year >= MLIR_AIE_YEAR)
        }
        None => true,
    }
}

fn peano_at(folder: Option<PathBuf>, work: &Path) -> Found {
    let Some(folder) = folder else {
        return Err(format!("not found: `{GET_PEANO}`, or name its folder with --peano"));
    };
    let clang = folder.join("bin/clang++");
    let ask = |argument: &str| printed(Command::new(&clang).arg(argument), work);
    let targets = ask("--print-targets").map_err(|problem| format!("{problem}: `{GET_PEANO}`"))?;
    if !targets.split_whitespace().any(|word| word == "aie2") {
        let lacks = "does not compile for aie2, the NPU's cores: it is not Peano";
        return Err(format!("{} {lacks}: `{GET_PEANO}`", clang.display()));
    }
    let version = ask("--version")?;
    Ok((version.lines().next().unwrap_or_default().trim().to_owned(), folder))
}

fn xclbinutil(work: &Path) -> Found {
    let get = "install XRT for Ryzen AI: the package libxrt-utils of Debian and Ubuntu, or AMD's own";
    let standard = PathBuf::from("/opt/xilinx/xrt/bin/xclbinutil");
    let Some(path) = in_path("xclbinutil").or_else(|| standard.is_file().then_some(standard)) else {
        return Err(format!("not found: {get}"));
    };
    let text =
        printed(Command::new(&path).arg("--version"), work).map_err(|problem| format!("{problem}: {get}"))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("XRT Build Version:"));
    let version = line.and_then(|rest| rest.split_whitespace().next()).unwrap_or("of unknown version");
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    let number = [numbers.next().unwrap_or(0u32), numbers.next().unwrap_or(0)];
    if number < XRT {
        return Err(format!("{version} is too old, {}.{} or newer is needed: {get}", XRT[0], XRT[1]));
    }
    Ok((version.to_owned(), path))
}

/// Searches for a program in the folders of PATH.
fn in_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_mlir_aie_are_dates_or_numbers() {
        for (version, is_new) in [
            ("0.0.1.2025042204+b6af6f5", true),
            ("0.0.1.2024121801+abc", false),
            ("0.0.1.", false),
            ("1.1.0", true),
            ("of unknown version", true),
        ] {
            assert_eq!(mlir_aie_is_new(version), is_new, "{version}");
        }
    }
}
