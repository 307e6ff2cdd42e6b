//! The stored results of the self-test's cases, `stored.json`: what the CPU twins of the shaders compute for the same
//! inputs. `tests/model/self_test.rs` writes the file, and checks that it still matches the twins.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// Values of one result, and how far a device may deviate from each of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Set {
    pub values: Vec<f64>,
    pub bound: f64,
    /// The largest magnitude of the whole result, from which the steps of int8 follow.
    pub largest: f64,
}

impl Set {
    /// These values, repeated several times.
    pub fn repeated(&self, times: usize) -> Set {
        Set { values: self.values.repeat(times), ..*self }
    }

    /// These values times `factor`.
    pub fn scaled(&self, factor: f64) -> Set {
        let values = self.values.iter().map(|value| value * factor).collect();
        Set { values, bound: self.bound * factor, largest: self.largest * factor }
    }

    /// The values at `wanted` of those at `places`.
    pub fn reordered<P: PartialEq>(&self, wanted: &[P], places: &[P]) -> Set {
        let at = |place| places.iter().position(|other| other == place).expect("a stored place");
        Set { values: wanted.iter().map(|place| self.values[at(place)]).collect(), ..*self }
    }
}

/// Sets by name: a kernel, and what distinguishes its results.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stored(pub BTreeMap<String, Set>);

impl Stored {
    /// The stored results in the binary.
    pub fn included() -> &'static Stored {
        static INCLUDED: OnceLock<Stored> = OnceLock::new();
        INCLUDED.get_or_init(|| {
            serde_json::from_str(include_str!("stored.json")).expect("tests/model/self_test.rs wrote it")
        })
    }

    pub fn find(&self, name: &str) -> Option<&Set> {
        self.0.get(name)
    }

    /// The set of a kernel that every model has.
    pub fn get(&self, name: &str) -> &Set {
        self.find(name).unwrap_or_else(|| panic!("no values of {name} are stored"))
    }
}
