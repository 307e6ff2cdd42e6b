//! The time that the kernel's driver lets a submit run before it takes the GPU for hung and resets it.

use std::path::Path;
use std::time::Duration;

/// Parameter of amdgpu; the file exists where the driver is loaded.
const LOCKUP_TIMEOUT: &str = "/sys/module/amdgpu/parameters/lockup_timeout";
/// The driver's timeout if the parameter is not set: 2 s for every queue since Linux 7, 10 s and more before.
const DEFAULT: Duration = Duration::from_secs(2);

/// The longest time that a submit should take: under a quarter of the driver's timeout, since an estimate may be far
/// off. `None` if amdgpu is not loaded, or has no timeout.
pub fn longest_submit() -> Option<Duration> {
    quarter_of_timeout(&std::fs::read_to_string(Path::new(LOCKUP_TIMEOUT)).ok()?)
}

/// A quarter of the least timeout in the parameter. The parameter is a number of milliseconds for all queues, or a list
/// by kind of queue, in an order that differs between kernels. 0, or nothing, is the default; a negative number is no
/// limit.
pub fn quarter_of_timeout(parameter: &str) -> Option<Duration> {
    let values = parameter.trim().split(',').map(|value| value.trim().parse::<i64>().unwrap_or(0));
    let patience = values.filter(|ms| *ms >= 0).map(|ms| match ms {
        0 => DEFAULT,
        ms => Duration::from_millis(ms as u64),
    });
    Some((patience.min()?.saturating_sub(Duration::from_millis(1)) / 4).max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submit_stays_under_a_quarter_of_what_the_driver_waits() {
        let cases = [
            ("", Some(499)),
            ("\n", Some(499)),
            ("(null)\n", Some(499)),
            ("0", Some(499)),
            ("10000\n", Some(2499)),
            ("10000,60000,10000,10000\n", Some(2499)),
            ("10000, 2000,-1,10000", Some(499)),
            ("800", Some(199)),
            ("1", Some(1)),
            ("-1", None),
        ];
        for (parameter, ms) in cases {
            let got = quarter_of_timeout(parameter).map(|longest| longest.as_millis());
            assert_eq!(got, ms, "{parameter:?}");
        }
    }
}
