//! The Vulkan device that tests run on.

use std::sync::{Arc, Mutex, OnceLock};

use unicorn::gpu::{Device, DeviceKind, DevicePolicy, Rehearsal};

/// The policy that chooses the device for every test: the device in `UNICORN_TEST_DEVICE`, or else the best GPU, or
/// else software Vulkan. The validation layer is on, and any of its messages fails the next wait. On machines without
/// that layer, set `UNICORN_TEST_VALIDATION=0`.
pub fn policy() -> DevicePolicy {
    DevicePolicy {
        device: std::env::var("UNICORN_TEST_DEVICE").ok(),
        allow_software: true,
        validation: std::env::var("UNICORN_TEST_VALIDATION").map_or(true, |value| value != "0"),
        ..DevicePolicy::default()
    }
}

/// Whether the tests' device is software Vulkan.
pub fn device_is_software() -> bool {
    device().info().kind == DeviceKind::Cpu
}

/// The device of [`policy`]. A test, which is a thread, always gets the same one. Tests share up to four open devices,
/// and at most one for each CPU core. A driver that computes on the CPU has one thread for each device.
pub fn device() -> Arc<Device> {
    const MOST: usize = 4;
    static OPENED: [OnceLock<Arc<Device>>; MOST] = [const { OnceLock::new() }; MOST];
    /// The number of tests that use each device.
    static USERS: Mutex<[usize; MOST]> = Mutex::new([0; MOST]);

    struct Mine(usize);
    impl Mine {
        fn new() -> Mine {
            let count = std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST));
            let mut users = USERS.lock().unwrap();
            let (at, fewest) = users[..count].iter_mut().enumerate().min_by_key(|(_, n)| **n).expect("one");
            *fewest += 1;
            Mine(at)
        }
    }
    impl Drop for Mine {
        fn drop(&mut self) {
            USERS.lock().unwrap()[self.0] -= 1;
        }
    }
    thread_local!(static MINE: Mine = Mine::new());

    let open = || {
        let device = Device::open(&policy()).unwrap_or_else(|e| panic!("{e}"));
        // Separate buffers let a layer that checks addresses find accesses out of bounds.
        let is_set = |variable: &str| std::env::var_os(variable).is_some();
        let separate_buffers = is_set("UNICORN_TEST_BUFFERS_APART");
        let guard_pages = is_set("UNICORN_TEST_GUARD_PAGES");
        device.rehearse(Rehearsal { separate_buffers, guard_pages, ..Rehearsal::default() });
        device
    };
    MINE.with(|mine| OPENED[mine.0].get_or_init(open).clone())
}
