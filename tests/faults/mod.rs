//! The shipped binary when the device fails.

mod layer;
