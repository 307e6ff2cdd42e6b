//! The energy that the machine uses, from the kernel: from RAPL's counters of the processor packages, or else from the
//! power of amdgpu's sensor, integrated over time. The two are never added, because both include an integrated GPU.
//!
//! A separate thread reads the files, because a sensor may answer slowly. It reads every 20 ms while the engine
//! requests the energy, and every second if the engine has not requested it for a second. Between readings, the power
//! of the last interval is assumed, for at most 2 s. If a reading fails, the energy is unknown. If a reading cannot be
//! compared with the previous one, a new count begins. This module only reads files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::doctor::{Machine, Pci, gpus, integrated};
use crate::device::Place;
use crate::engine::{Energy, EnergyCounter};

/// The time between two readings while the engine requests the energy. RAPL's counters change every millisecond, so a
/// reading is wrong by at most a twentieth. A shorter interval would cost more than the precision is worth.
const BUSY: Duration = Duration::from_millis(20);
/// The time between two readings while the engine does not request the energy, and the time without a request after
/// which this interval is used. It must be short enough for RAPL's counters, which may wrap within minutes.
const REST: Duration = Duration::from_secs(1);
/// Longest wait of the engine for a reading, at the first request after a second without one.
const FRESH: Duration = Duration::from_millis(2);
/// More than the power of any processor or GPU. If a counter has grown faster, it was reset or the machine was
/// suspended.
const MAX_WATTS: f64 = 2000.0;
/// Maximum bytes of a file, which has one number.
const FILE_BYTES: usize = 32;

/// Reads the machine's energy until it is dropped.
#[derive(Debug)]
pub struct Meter {
    source: &'static str,
    state: Mutex<State>,
    /// Signalled after each reading.
    sampled: Condvar,
    sampler: OnceLock<Thread>,
}

#[derive(Debug, Default)]
struct State {
    joules: f64,
    /// Mean power between the last two readings.
    watts: f64,
    /// The time of the last reading; `None` before the second reading, and after a failed one.
    at: Option<Instant>,
    gaps: u32,
    /// The time of the engine's last request.
    asked: Option<Instant>,
    /// Whether the next reading is up to [`REST`] away.
    resting: bool,
}

impl Meter {
    /// Opens the first source that can be read. The error names all sources and why they cannot be read.
    pub fn open(machine: &Machine, place: &Place) -> Result<Arc<Self>, String> {
        let (source, name) = match rapl(machine, place) {
            Ok(packages) => (Source::Rapl(packages), "rapl"),
            Err(no_rapl) => match amdgpu(machine, place) {
                Ok(sensor) => (Source::Amdgpu(sensor), "amdgpu"),
                Err(no_amdgpu) => return Err(format!("{no_rapl}; {no_amdgpu}")),
            },
        };
        let meter = Arc::new(Self {
            source: name,
            state: Mutex::default(),
            sampled: Condvar::new(),
            sampler: OnceLock::new(),
        });
        let (weak, mut sampler) = (Arc::downgrade(&meter), Sampler { source, before: None });
        let thread = thread::Builder::new().name("energy".into()).spawn(move || {
            while let Some(pause) = Weak::upgrade(&weak).map(|meter| meter.tick(&mut sampler, Instant::now()))
            {
                thread::park_timeout(pause);
            }
        });
        let thread =
            thread.map_err(|error| format!("cannot start the thread that reads the energy: {error}"))?;
        meter.sampler.set(thread.thread().clone()).expect("set once");
        // The power for the first answer needs two readings.
        let waited = meter.sampled.wait_timeout_while(meter.locked(), 10 * BUSY, |state| state.at.is_none());
        drop(waited);
        Ok(meter)
    }

    /// The joules of all readings; `None` while they cannot be read.
    pub fn counted(&self) -> Option<f64> {
        let state = self.locked();
        state.at.map(|_| state.joules)
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under this lock")
    }

    /// Takes a reading. Returns the time until the next one.
    fn tick(&self, sampler: &mut Sampler, now: Instant) -> Duration {
        // Reading the files may take long, so the lock is taken after it.
        let Some(sample) = sampler.sample(now) else { return BUSY };
        let mut state = self.locked();
        match &sample {
            Ok(None) => state.at = None,
            Ok(Some((joules, elapsed))) => {
                state.joules += joules;
                state.watts = joules / elapsed.as_secs_f64();
                state.at = Some(now);
            }
            Err(why) => {
                state.at = None;
                state.gaps += 1;
                if state.gaps == 1 {
                    tracing::warn!("the energy of the machine cannot be read at the moment: {why}");
                }
            }
        }
        self.sampled.notify_all();
        let is_asked = state.asked.is_some_and(|asked| asked + REST > now);
        state.resting = !is_asked && !matches!(sample, Ok(None));
        if state.resting { REST } else { BUSY }
    }
}

impl EnergyCounter for Meter {
    fn source(&self) -> &'static str {
        self.source
    }

    fn read(&self) -> Option<Energy> {
        let now = Instant::now();
        let mut state = self.locked();
        state.asked = Some(now);
        if std::mem::take(&mut state.resting)
            && let Some(sampler) = self.sampler.get()
        {
            sampler.unpark();
            let is_old = |state: &mut State| state.at.is_some_and(|at| at + BUSY < now);
            let waited = self.sampled.wait_timeout_while(state, FRESH, is_old);
            state = waited.expect("nothing panics under this lock").0;
        }
        let since = Instant::now().saturating_duration_since(state.at?).min(2 * REST);
        Some(Energy { joules: state.joules + state.watts * since.as_secs_f64(), gaps: state.gaps })
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(sampler) = self.sampler.get() {
            sampler.unpark();
        }
    }
}

/// The reading side of the meter, in its thread.
struct Sampler {
    source: Source,
    /// The time of the last reading; `None` if the next reading begins a new count.
    before: Option<Instant>,
}

impl Sampler {
    /// The joules and the time since the last reading; `Ok(None)` at the first reading. `None` if the last reading is
    /// too recent for a precise power.
    fn sample(&mut self, now: Instant) -> Option<Result<Option<(f64, Duration)>, String>> {
        let elapsed = self.before.map(|before| now - before);
        if elapsed.is_some_and(|elapsed| elapsed < BUSY / 2) {
            return None;
        }
        self.before = None;
        Some(self.source.read(elapsed).map(|joules| {
            self.before = Some(now);
            joules.zip(elapsed)
        }))
    }
}

enum Source {
    Rapl(Vec<Package>),
    Amdgpu(Sensor),
}

impl Source {
    /// The joules of the time `elapsed` since the last reading; `Ok(None)` if there was no last reading.
    fn read(&mut self, elapsed: Option<Duration>) -> Result<Option<f64>, String> {
        match self {
            Source::Rapl(packages) => packages
                .iter_mut()
                .map(|package| package.read(elapsed))
                .try_fold(Some(0.0), |sum, joules| Ok(sum.zip(joules?).map(|(a, b)| a + b))),
            Source::Amdgpu(sensor) => sensor.read(elapsed),
        }
    }
}

/// An open file that holds one number.
struct Number {
    path: String,
    file: File,
}

impl Number {
    /// Opens a file, and checks that it holds a number.
    fn open(machine: &Machine, path: String) -> Result<Self, String> {
        let file = machine.open(&path).map_err(|error| unreadable(&path, &error))?;
        let number = Self { path, file };
        number.read()?;
        Ok(number)
    }

    fn read(&self) -> Result<u64, String> {
        let mut bytes = [0; FILE_BYTES];
        let length = self.file.read_at(&mut bytes, 0).map_err(|error| unreadable(&self.path, &error))?;
        let text = String::from_utf8_lossy(&bytes[..length]);
        text.trim().parse().map_err(|_| format!("/{}: {:?} is not a number", self.path, text.trim()))
    }
}

fn unreadable(path: &str, error: &io::Error) -> String {
    // Only root may read RAPL's counters (CVE-2020-8694), unless an administrator has changed the permissions.
    let help =
        if error.kind() == io::ErrorKind::PermissionDenied { " (docs/operations.md: Energy)" } else { "" };
    format!("/{path}: {error}{help}")
}

/// RAPL's counter of one package: a processor with its memory controller and integrated GPU.
struct Package {
    energy: Number,
    /// The value after which the counter wraps to 0, in microjoules; `None` if it cannot be read.
    range: Option<u64>,
    /// The last reading, in microjoules.
    last: u64,
}

impl Package {
    fn read(&mut self, elapsed: Option<Duration>) -> Result<Option<f64>, String> {
        let now = self.energy.read()?;
        let last = std::mem::replace(&mut self.last, now);
        let Some(elapsed) = elapsed else { return Ok(None) };
        let grown = match self.range {
            _ if now >= last => Some(now - last),
            Some(range) => range.checked_sub(last).map(|rest| rest + now),
            None => None,
        };
        let joules = grown.map(|microjoules| microjoules as f64 / 1e6);
        let credible = joules.filter(|joules| *joules <= MAX_WATTS * elapsed.as_secs_f64());
        credible
            .map(Some)
            .ok_or_else(|| format!("/{}: implausible step from {last} to {now}", self.energy.path))
    }
}

/// amdgpu's sensor of power.
struct Sensor {
    power: Number,
    /// The last reading, in watts.
    last: f64,
}

impl Sensor {
    fn read(&mut self, elapsed: Option<Duration>) -> Result<Option<f64>, String> {
        let watts = self.power.read()? as f64 / 1e6;
        if watts > MAX_WATTS {
            return Err(format!("/{}: {watts} W is too much for a GPU", self.power.path));
        }
        let mean = (watts + std::mem::replace(&mut self.last, watts)) / 2.0;
        Ok(elapsed.map(|elapsed| mean * elapsed.as_secs_f64()))
    }
}

/// Opens the counters of all packages. It fails if one of them cannot be read, because the machine's energy is their
/// sum. The driver is called intel-rapl on AMD processors too.
fn rapl(machine: &Machine, place: &Place) -> Result<Vec<Package>, String> {
    const FOLDER: &str = "sys/class/powercap";
    if place.discrete {
        return Err("RAPL does not include the discrete GPU that computes".into());
    }
    let zones = machine.names(FOLDER, "intel-rapl:").into_iter().map(|zone| format!("{FOLDER}/{zone}"));
    // Other zones are parts of a package, or the platform as a whole.
    let is_package =
        |zone: &String| machine.read(&format!("{zone}/name")).is_ok_and(|name| name.starts_with("package"));
    let open = |zone: String| {
        let energy = Number::open(machine, format!("{zone}/energy_uj"))?;
        let range = machine.number(&format!("{zone}/max_energy_range_uj")).ok();
        Ok(Package { energy, range, last: 0 })
    };
    let packages: Vec<Package> = zones.filter(is_package).map(open).collect::<Result<_, String>>()?;
    if packages.is_empty() { Err(format!("/{FOLDER} has no RAPL package")) } else { Ok(packages) }
}

/// Opens the power sensor of the GPU that computes. If the processor computes (software Vulkan), it opens the sensor of
/// the integrated GPU, which reports the power of the whole chip (<https://docs.kernel.org/gpu/amdgpu/thermal.html>).
fn amdgpu(machine: &Machine, place: &Place) -> Result<Sensor, String> {
    let gpus = gpus(machine).into_iter().filter(|gpu| gpu.driver.as_deref() == Some("amdgpu"));
    let computes = |gpu: &Pci| match &place.pci {
        Some(address) => gpu.address.eq_ignore_ascii_case(address),
        None => !place.discrete && integrated(gpu).is_some(),
    };
    let Some(gpu) = gpus.into_iter().find(computes) else {
        return Err("amdgpu has no GPU whose power sensor includes this device".into());
    };
    let folder = format!("{}/hwmon", gpu.folder);
    let mut reason = format!("/{folder} has no power sensor");
    for sensor in machine.names(&folder, "hwmon") {
        for name in ["power1_average", "power1_input"] {
            let path = format!("{folder}/{sensor}/{name}");
            if machine.exists(&path) {
                match Number::open(machine, path) {
                    Ok(power) => return Ok(Sensor { power, last: 0.0 }),
                    Err(why) => reason = why,
                }
            }
        }
    }
    Err(reason)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use tempfile::TempDir;

    use super::*;

    const ZONE: &str = "sys/class/powercap/intel-rapl:0";
    const GPU: &str = "sys/bus/pci/devices/0000:c5:00.0";

    /// A machine with these files.
    fn machine(files: &[(&str, &str, &str)]) -> (TempDir, Machine) {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(zone, name, text)| write(folder.path(), &format!("{zone}/{name}"), text));
        let machine = Machine::new(Some(folder.path()));
        (folder, machine)
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn package<'a>(zone: &'a str, energy: &'a str) -> [(&'a str, &'a str, &'a str); 3] {
        [
            (zone, "name", "package-0\n"),
            (zone, "energy_uj", energy),
            (zone, "max_energy_range_uj", "1000000\n"),
        ]
    }

    /// A Radeon 780M with these sensors.
    fn with_gpu(files: &[(&str, &str, &str)]) -> (TempDir, Machine) {
        let (folder, machine) = machine(files);
        for (name, text) in [("vendor", "0x1002"), ("device", "0x15bf"), ("class", "0x030000")] {
            write(folder.path(), &format!("{GPU}/{name}"), text);
        }
        symlink("../../drivers/amdgpu", folder.path().join(format!("{GPU}/driver"))).unwrap();
        (folder, machine)
    }

    fn sampler(machine: &Machine) -> Sampler {
        Sampler { source: Source::Rapl(rapl(machine, &Place::default()).unwrap()), before: None }
    }

    /// The meter without its thread.
    fn meter() -> Meter {
        Meter { source: "rapl", state: Mutex::default(), sampled: Condvar::new(), sampler: OnceLock::new() }
    }

    fn joules(sample: Option<Result<Option<(f64, Duration)>, String>>) -> Result<Option<f64>, String> {
        sample.expect("not too soon").map(|sample| sample.map(|(joules, _)| joules))
    }

    #[test]
    fn a_counter_that_wraps_keeps_its_count() {
        let (folder, machine) = machine(&package(ZONE, "100000\n"));
        let (mut sampler, start) = (sampler(&machine), Instant::now());
        let mut at = |ms: u64, microjoules: &str| {
            write(folder.path(), &format!("{ZONE}/energy_uj"), microjoules);
            joules(sampler.sample(start + Duration::from_millis(ms)))
        };
        assert_eq!(at(0, "100000\n"), Ok(None));
        assert_eq!(at(20, "900000\n"), Ok(Some(0.8)));
        assert_eq!(at(40, "50000\n"), Ok(Some(0.15)), "the counter wrapped at its range of 1 J");
        assert_eq!(at(60, "50000\n"), Ok(Some(0.0)));
    }

    #[test]
    fn a_counter_that_cannot_be_followed_begins_a_new_count() {
        let (folder, machine) = machine(&package(ZONE, "100000\n"));
        let zone = folder.path().join(ZONE);
        fs::remove_file(zone.join("max_energy_range_uj")).unwrap();
        let (meter, mut sampler, start) = (meter(), sampler(&machine), Instant::now());
        let mut at = |ms: u64, text: &str| {
            fs::write(zone.join("energy_uj"), text).unwrap();
            meter.tick(&mut sampler, start + Duration::from_millis(ms));
            meter.read().map(|energy| energy.gaps).zip(meter.counted())
        };
        assert_eq!(at(0, "100000"), None, "one reading gives no power");
        assert_eq!(at(20, "300000"), Some((0, 0.2)));
        for (ms, broken) in [
            (40, "200000"), // a counter whose range is not known has wrapped, or was reset
            (80, ""),
            (120, "garbage"),
            (160, "99000000000"), // after a suspend or a reset: 99 kJ within 20 ms
        ] {
            assert_eq!(at(ms, broken), None, "{broken:?}");
            assert_eq!(at(ms + 20, "500000"), None, "{broken:?}: the first reading after it");
        }
        assert_eq!(at(200, "600000"), Some((4, 0.2 + 0.1)));
    }

    #[test]
    fn a_reading_soon_after_the_last_one_gives_no_power() {
        let (_folder, machine) = machine(&package(ZONE, "1"));
        let (mut sampler, start) = (sampler(&machine), Instant::now());
        assert_eq!(joules(sampler.sample(start)), Ok(None));
        assert!(sampler.sample(start + BUSY / 4).is_none());
        assert_eq!(joules(sampler.sample(start + BUSY)), Ok(Some(0.0)));
    }

    #[test]
    fn between_readings_the_last_power_counts_for_at_most_two_seconds() {
        let (folder, machine) = machine(&package(ZONE, "0"));
        let (meter, mut sampler) = (meter(), sampler(&machine));
        // The power was 2 W up to the last reading, a while ago.
        let now = Instant::now();
        for (ago, microjoules) in [(9100, "0"), (9000, "200000")] {
            write(folder.path(), &format!("{ZONE}/energy_uj"), microjoules);
            meter.tick(&mut sampler, now - Duration::from_millis(ago));
        }
        let energy = meter.read().unwrap();
        assert!((energy.joules - (0.2 + 2.0 * 2.0)).abs() < 1e-9, "{energy:?}: at most two seconds at 2 W");
        assert_eq!(meter.counted(), Some(0.2), "only readings are counted");
    }

    #[test]
    fn packages_add_up_and_their_parts_do_not() {
        let (folder, machine) = machine(&[]);
        for (zone, name, energy) in [
            ("intel-rapl:0", "package-0", "100000"),
            ("intel-rapl:0:0", "core", "70000"),
            ("intel-rapl:1", "package-1", "200000"),
            ("intel-rapl:2", "psys", "900000"),
            ("intel-rapl-mmio:0", "package-0", "100000"),
        ] {
            write(folder.path(), &format!("sys/class/powercap/{zone}/name"), name);
            write(folder.path(), &format!("sys/class/powercap/{zone}/energy_uj"), energy);
        }
        let (mut sampler, start) = (sampler(&machine), Instant::now());
        assert_eq!(joules(sampler.sample(start)), Ok(None));
        for (zone, energy) in [("intel-rapl:0", "400000"), ("intel-rapl:1", "300000")] {
            write(folder.path(), &format!("sys/class/powercap/{zone}/energy_uj"), energy);
        }
        let sum = joules(sampler.sample(start + BUSY)).unwrap().unwrap();
        assert!((sum - 0.4).abs() < 1e-9, "{sum}");

        fs::remove_file(folder.path().join("sys/class/powercap/intel-rapl:1/energy_uj")).unwrap();
        let error = rapl(&machine, &Place::default()).err().expect("a package is missing");
        assert!(error.contains("/sys/class/powercap/intel-rapl:1/energy_uj: No such file"), "{error}");
    }

    #[test]
    fn power_is_added_up_over_time() {
        let power = format!("{GPU}/hwmon/hwmon3");
        let (folder, machine) = with_gpu(&[(&power, "power1_input", "10000000\n")]);
        let sensor = amdgpu(&machine, &Place::default()).unwrap();
        let (mut sampler, start) = (Sampler { source: Source::Amdgpu(sensor), before: None }, Instant::now());
        assert_eq!(joules(sampler.sample(start)), Ok(None));
        assert_eq!(joules(sampler.sample(start + Duration::from_millis(500))), Ok(Some(5.0)));
        write(folder.path(), &format!("{power}/power1_input"), "30000000\n");
        assert_eq!(
            joules(sampler.sample(start + Duration::from_millis(600))),
            Ok(Some(2.0)),
            "the mean of 10 W and 30 W"
        );
    }

    #[test]
    fn rapl_is_preferred_and_the_error_names_every_source() {
        let power = format!("{GPU}/hwmon/hwmon3");
        let mut files = package(ZONE, "1").to_vec();
        files.push((&power, "power1_average", "9000000"));
        let (folder, machine) = with_gpu(&files);
        let place = |discrete, pci: Option<&str>| Place { discrete, pci: pci.map(str::to_owned) };
        let source = |place: &Place| Meter::open(&machine, place).map(|meter| meter.source());
        assert_eq!(source(&place(false, Some("0000:c5:00.0"))), Ok("rapl"));
        assert_eq!(source(&place(true, Some("0000:C5:00.0"))), Ok("amdgpu"), "the discrete GPU's own");
        let error = source(&place(true, Some("0000:03:00.0"))).unwrap_err();
        assert!(error.contains("the discrete GPU that computes; amdgpu has no GPU"), "{error}");

        for broken in ["", "much\n"] {
            write(folder.path(), &format!("{ZONE}/energy_uj"), broken);
            assert_eq!(source(&place(false, None)), Ok("amdgpu"), "{broken:?}");
            write(folder.path(), &format!("{power}/power1_average"), broken);
            let error = source(&place(false, None)).unwrap_err();
            assert!(error.contains("energy_uj: ") && error.contains("power1_average: "), "{error}");
            assert_eq!(error.matches("is not a number").count(), 2, "{error}");
            write(folder.path(), &format!("{power}/power1_average"), "9000000");
        }
        fs::remove_dir_all(folder.path().join("sys")).unwrap();
        let error = source(&place(false, None)).unwrap_err();
        assert!(error.starts_with("/sys/class/powercap has no RAPL package; amdgpu has no GPU"), "{error}");
    }

    #[test]
    fn an_unreadable_counter_names_the_documentation() {
        let error = unreadable("sys/x", &io::ErrorKind::PermissionDenied.into());
        assert_eq!(error, "/sys/x: permission denied (docs/operations.md: Energy)");
        assert_eq!(unreadable("sys/x", &io::ErrorKind::NotFound.into()), "/sys/x: entity not found");
    }
}
