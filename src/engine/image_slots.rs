//! Which images' embeddings the runner's slots have.
//!
//! The slots follow the steps in the order in which they are scheduled: an image that a step takes a slot for is encoded
//! before that step is submitted ([`Runner::encode_image`](crate::model::Runner::encode_image)). The steps before it may
//! still be in flight: the runner lets them read the old embeddings. So only the images of the step under construction
//! keep their slots. Of the other slots, the least recently used one is taken first.
//!
//! A new runner has no embeddings, so the slots are then replaced by new ones.

use super::request::ImageHash;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Slot {
    image: Option<ImageHash>,
    /// When the slot was last taken; 0 = never.
    taken: u64,
}

/// The slot of an image in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TakenSlot {
    pub(super) slot: u32,
    /// Whether the image must be encoded before the step, because the slot had another one.
    pub(super) is_new: bool,
}

#[derive(Debug, Clone)]
pub(super) struct ImageSlots {
    slots: Vec<Slot>,
    clock: u64,
    /// The slots that were taken since this time belong to the step under construction.
    step_began: u64,
    /// How many more images may be encoded for the step under construction.
    encodings: usize,
}

impl ImageSlots {
    /// Slots without images.
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], clock: 0, step_began: 1, encodings: 0 }
    }

    /// Begins a step for which at most `encodings` images are encoded.
    pub(super) fn begin_step(&mut self, encodings: usize) {
        self.step_began = self.clock + 1;
        self.encodings = encodings;
    }

    /// Takes a slot for an image of the step under construction: the slot that has the image, or else the least recently
    /// used one. `None` if the step uses all slots, or if no more images may be encoded for it.
    pub(super) fn take(&mut self, image: &ImageHash) -> Option<TakenSlot> {
        let found = self.slots.iter().position(|slot| slot.image.as_ref() == Some(image));
        let index = match found {
            Some(index) => index,
            None if self.encodings == 0 => return None,
            None => {
                let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.taken < self.step_began);
                let (index, _) = free.min_by_key(|(_, slot)| slot.taken)?;
                self.encodings -= 1;
                index
            }
        };
        self.clock += 1;
        self.slots[index] = Slot { image: Some(*image), taken: self.clock };
        Some(TakenSlot { slot: index as u32, is_new: found.is_none() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(slots: &mut ImageSlots, image: u8) -> Option<(u32, bool)> {
        slots.take(&[image; 32]).map(|TakenSlot { slot, is_new }| (slot, is_new))
    }

    #[test]
    fn an_image_keeps_its_slot_until_it_is_the_least_recently_used_one() {
        let mut slots = ImageSlots::new(2);
        let mut in_own_step = |image| {
            slots.begin_step(1);
            take(&mut slots, image)
        };
        assert_eq!([1, 2, 1].map(&mut in_own_step), [Some((0, true)), Some((1, true)), Some((0, false))]);
        assert_eq!(in_own_step(3), Some((1, true)), "image 2 was used before image 1");
        assert_eq!([1, 2].map(in_own_step), [Some((0, false)), Some((1, true))]);
    }

    #[test]
    fn a_step_never_takes_a_slot_twice_for_different_images() {
        let mut slots = ImageSlots::new(2);
        slots.begin_step(usize::MAX);
        assert_eq!([1, 2].map(|image| take(&mut slots, image)), [Some((0, true)), Some((1, true))]);
        assert_eq!(take(&mut slots, 3), None, "the step uses both");
        assert_eq!(take(&mut slots, 1), Some((0, false)), "the same image again");
        slots.begin_step(usize::MAX);
        assert_eq!(take(&mut slots, 3), Some((1, true)), "the next step uses none yet");
        assert_eq!(take(&mut slots, 2), Some((0, true)));
    }

    #[test]
    fn a_step_encodes_no_more_images_than_it_may() {
        let mut slots = ImageSlots::new(3);
        slots.begin_step(1);
        assert_eq!([1, 2, 1].map(|image| take(&mut slots, image)), [Some((0, true)), None, Some((0, false))]);
        slots.begin_step(1);
        assert_eq!([1, 2, 3].map(|image| take(&mut slots, image)), [Some((0, false)), Some((1, true)), None]);
        slots.begin_step(0);
        assert_eq!(
            [1, 2, 3].map(|image| take(&mut slots, image)),
            [Some((0, false)), Some((1, false)), None]
        );
    }

    #[test]
    fn no_slots_have_no_image() {
        let mut slots = ImageSlots::new(0);
        slots.begin_step(usize::MAX);
        assert_eq!(take(&mut slots, 1), None);
    }
}
