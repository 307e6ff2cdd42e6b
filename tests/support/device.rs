//! The device that tests run on.

use std::sync::{Arc, Mutex, OnceLock};

use unicorn::gpu::{Device, DevicePolicy, Rehearsal};

/// The choice of the device that every test runs on: the one that `UNICORN_TEST_DEVICE` names, else the best GPU, else
/// software Vulkan. The validation layer is on, and its every message fails the test that waits next;
/// `UNICORN_TEST_VALIDATION=0` is for machines that have no such layer.
pub fn policy() -> DevicePolicy {
    DevicePolicy {
        device: std::env::var("UNICORN_TEST_DEVICE").ok(),
        allow_software: true,
        validation: std::env::var("UNICORN_TEST_VALIDATION").map_or(true, |value| value != "0"),
        ..DevicePolicy::default()
    }
}

/// The device of [`policy`]: one and the same for all of a test, which is a thread. It is opened once for many tests,
/// and as often as tests run side by side. A driver that computes on the CPU has one thread for each.
pub fn device() -> Arc<Device> {
    const MOST: usize = 4;
    static OPENED: [OnceLock<Arc<Device>>; MOST] = [const { OnceLock::new() }; MOST];
    /// How many tests have each.
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
        // For a layer that checks addresses.
        let separate_buffers = std::env::var_os("UNICORN_TEST_BUFFERS_APART").is_some();
        device.rehearse(Rehearsal { separate_buffers, ..Rehearsal::default() });
        device
    };
    MINE.with(|mine| OPENED[mine.0].get_or_init(open).clone())
}
