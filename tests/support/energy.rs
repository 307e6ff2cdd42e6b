//! Machines, as file trees, with and without energy sensors.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

/// The power of [`constant_power`], in watts.
pub const WATTS: f64 = 15.0;

/// A machine with a Radeon 780M whose sensor always reports [`WATTS`].
pub fn constant_power() -> TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let gpu = root.path().join("sys/bus/pci/devices/0000:c5:00.0");
    let sensor = gpu.join("hwmon/hwmon3");
    fs::create_dir_all(&sensor).expect("written");
    for (name, text) in [("vendor", "0x1002"), ("device", "0x15bf"), ("class", "0x030000")] {
        fs::write(gpu.join(name), text).expect("written");
    }
    fs::write(sensor.join("power1_average"), format!("{}\n", (WATTS * 1e6) as u64)).expect("written");
    symlink("../../../drivers/amdgpu", gpu.join("driver")).expect("linked");
    root
}

/// A machine without energy sensors.
pub fn no_power() -> TempDir {
    tempfile::tempdir().expect("a folder")
}
