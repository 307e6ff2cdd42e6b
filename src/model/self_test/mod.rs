//! The self-test of a loaded model. It runs every kernel that the model's steps dispatch, in the variants that were
//! chosen for this model, device and driver, on small inputs for which results are stored.
//!
//! It refuses a device if a result differs from the stored result, and names the kernel. It checks the device and its
//! driver, not the checkpoint. Invariants: the test has its own buffers, which are planned with the model's, so that it
//! needs no memory after the load and changes nothing that a step reads; every result is poisoned before a case writes
//! it, on the device and on the host; a device that fails to run a case counts as lost, or short of memory, and never
//! as "right".

mod cases;
mod experts;
pub mod inputs;
mod stored;
mod tested_experts;

use std::sync::Arc;

pub use self::cases::{Element, Traits, buffer_bytes, result_bytes};
pub use self::stored::{Set, Stored};
pub use self::tested_experts::TestedExperts;

use self::cases::{Case, Cases, Mismatch, POISON};
use super::runner::RunnerError;
use crate::gpu::{Buffer, CommandBuffer, Device, Submission};
use crate::kernels::Kernels;

/// Cases that one probe runs.
const PROBED: usize = 4;

/// The cases of one model, in their buffer.
pub struct SelfTest {
    device: Arc<Device>,
    cases: Vec<Case>,
    untested: Vec<String>,
    results: Buffer,
    /// The case at which the next probe begins.
    next: usize,
}

impl SelfTest {
    /// Cases in a device buffer of [`buffer_bytes`], with results of [`result_bytes`] that the host reads. Also returns
    /// the bytes that the first buffer must contain before the cases run.
    pub fn new(
        device: &Arc<Device>,
        kernels: &Kernels,
        traits: &Traits,
        buffer: &Buffer,
        results: Buffer,
    ) -> (SelfTest, Vec<u8>) {
        let Cases { cases, image, untested } = Cases::new(buffer, kernels, traits, Stored::included());
        (SelfTest { device: Arc::clone(device), cases, untested, results, next: 0 }, image)
    }

    /// Products whose scheme has no stored values.
    pub fn untested(&self) -> &[String] {
        &self.untested
    }

    /// The kernels of the cases, in their order.
    pub fn kernels(&self) -> impl ExactSizeIterator<Item = &str> {
        self.cases.iter().map(|case| &case.kernel[..])
    }

    /// Runs all cases. Returns their number, or an error that names the first wrong case.
    pub fn run(&self, kernels: &Kernels) -> Result<usize, RunnerError> {
        let mut first = 0;
        while first < self.cases.len() {
            let mut bytes = 0;
            let fits = |case: &&Case| {
                bytes += case.bytes();
                bytes <= self.results.size()
            };
            let count = self.cases[first..].iter().take_while(fits).count();
            assert!(count > 0, "{}: the results do not fit", self.cases[first].kernel);
            self.run_some(kernels, &self.cases[first..first + count])?;
            first += count;
        }
        Ok(self.cases.len())
    }

    /// Runs a few cases. Each call continues with the next cases.
    pub fn probe(&mut self, kernels: &Kernels) -> Result<(), RunnerError> {
        for _ in 0..PROBED.min(self.cases.len()) {
            let case = self.next % self.cases.len();
            self.next = case + 1;
            self.run_some(kernels, &self.cases[case..=case])?;
        }
        Ok(())
    }

    /// Runs cases in one submit, and compares their results.
    fn run_some(&self, kernels: &Kernels, cases: &[Case]) -> Result<(), RunnerError> {
        let total: u64 = cases.iter().map(Case::bytes).sum();
        let mut bytes = vec![0u8; total as usize];
        self.results.write(0, &vec![POISON; bytes.len() / 4]);
        let mut commands = CommandBuffer::new(&self.device, "self-test")?;
        let mut submission = Submission::untimed(&self.device)?;
        commands.record_for_one_submit(&mut |recorder| {
            let mut at = 0;
            for case in cases {
                case.record(kernels, recorder, &self.results.slice(at, case.bytes()));
                at += case.bytes();
            }
        })?;
        submission.submit(&mut [&mut commands], "the self-test")?;
        submission.wait()?;
        // If the device is profiled, the wait collects the kernels' times.
        commands.wait()?;
        self.results.read(0, &mut bytes);
        self.compare(cases, &bytes)
    }

    fn compare(&self, cases: &[Case], mut bytes: &[u8]) -> Result<(), RunnerError> {
        for case in cases {
            let (own, rest) = bytes.split_at(case.bytes() as usize);
            bytes = rest;
            case.compare(own).map_err(|mismatch| self.wrong(case, &mismatch))?;
        }
        Ok(())
    }

    fn wrong(&self, case: &Case, mismatch: &Mismatch) -> RunnerError {
        let Mismatch { output, element: Element { index, value, bound }, got } = mismatch;
        let info = self.device.info();
        RunnerError::Wrong(format!(
            "kernel {}: {output}[{index}] is {got}, it should be {value}, or {bound:.1e} off at most, on {}, {}: update the \
             driver, or choose another device with --device; another start does not help",
            case.kernel, info.name, info.driver
        ))
    }

    /// The ways to damage right results that no comparison detects; there should be none.
    #[doc(hidden)]
    pub fn missed_damage(&self, kernels: &Kernels) -> Result<Vec<String>, RunnerError> {
        let mut missed = Vec::new();
        for case in &self.cases {
            self.run_some(kernels, std::slice::from_ref(case))?;
            let mut bytes = vec![0u8; case.bytes() as usize];
            self.results.read(0, &mut bytes);
            missed.extend(case.misses(&bytes).into_iter().map(|what| format!("{}: {what}", case.kernel)));
        }
        Ok(missed)
    }
}
