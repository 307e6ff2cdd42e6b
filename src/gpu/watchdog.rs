//! How long the kernel driver lets a submit run before it considers the GPU hung and resets it.

use std::path::Path;
use std::time::Duration;

/// A parameter of amdgpu. The file exists if the driver is loaded.
const LOCKUP_TIMEOUT: &str = "/sys/module/amdgpu/parameters/lockup_timeout";
/// The driver's timeout if the parameter is not set: 2 s for every queue since Linux 7; older kernels use 10 s or more.
const DEFAULT: Duration = Duration::from_secs(2);

/// The longest time that a submit should take: less than a quarter of the driver's timeout, because estimates of a
/// submit's time are inaccurate. `None`: amdgpu is not loaded, or it has no timeout.
pub fn longest_submit() -> Option<Duration> {
    quarter_of_timeout(&std::fs::read_to_string(Path::new(LOCKUP_TIMEOUT)).ok()?)
}

/// Slightly less than a quarter of the shortest timeout in the parameter. The parameter is a number of milliseconds for
/// all queues, or a list with one number per kind of queue, in an order that differs between kernels. 0 or an empty
/// value means the default timeout; a negative number means no timeout.
pub fn quarter_of_timeout(parameter: &str) -> Option<Duration> {
    let values = parameter.trim().split(',').map(|value| value.trim().parse::<i64>().unwrap_or(0));
    let timeouts = values.filter(|ms| *ms >= 0).map(|ms| match ms {
        0 => DEFAULT,
        ms => Duration::from_millis(ms as u64),
    });
    Some((timeouts.min()?.saturating_sub(Duration::from_millis(1)) / 4).max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submit_stays_under_a_quarter_of_the_drivers_timeout() {
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
