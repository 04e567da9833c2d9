//! The models that are on the GPU, from the client's view.

/// The models that are on the GPU. If another model needs a place, the least recently used model without
/// requests leaves.
#[derive(Debug)]
pub(super) struct ModelSlots {
    capacity: usize,
    /// The models on the GPU, least recently used first.
    slots: Vec<ModelSlot>,
    /// The models that have lost their slot, but are not unloaded yet.
    leaving: Vec<usize>,
}

#[derive(Debug)]
struct ModelSlot {
    model: usize,
    is_loaded: bool,
    /// The number of requests in flight.
    in_flight: u32,
}

/// The place of a model for which a request arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotReply {
    /// The model is on the GPU. The request is in flight until [`ModelSlots::end`].
    Loaded,
    /// The model has a slot. The request must unload `evicted`, call [`ModelSlots::finish_unload`], load the
    /// model, and call [`ModelSlots::finish_load`].
    Load { evicted: Option<usize> },
    /// Another request loads or unloads the model, or no model can leave. The request must ask again after
    /// a change.
    Wait,
}

impl ModelSlots {
    /// Returns slots for `capacity` models, which are all free.
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, slots: Vec::new(), leaving: Vec::new() }
    }

    /// Returns the place of `model`, which a request needs now.
    pub(super) fn request(&mut self, model: usize) -> SlotReply {
        if let Some(index) = self.slots.iter().position(|slot| slot.model == model) {
            let mut slot = self.slots.remove(index);
            let is_loaded = slot.is_loaded;
            slot.in_flight += u32::from(is_loaded);
            self.slots.push(slot);
            return if is_loaded { SlotReply::Loaded } else { SlotReply::Wait };
        }
        if self.leaving.contains(&model) {
            return SlotReply::Wait;
        }
        let mut evicted = None;
        if self.slots.len() == self.capacity {
            let idle = self.slots.iter().position(|slot| slot.is_loaded && slot.in_flight == 0);
            let Some(index) = idle else { return SlotReply::Wait };
            evicted = Some(self.slots.remove(index).model);
            self.leaving.extend(evicted);
        }
        self.slots.push(ModelSlot { model, is_loaded: false, in_flight: 0 });
        SlotReply::Load { evicted }
    }

    /// Forgets a model that has left.
    pub(super) fn finish_unload(&mut self, evicted: usize) {
        self.leaving.retain(|model| *model != evicted);
    }

    /// Marks a model as loaded, or frees its slot if the load failed.
    pub(super) fn finish_load(&mut self, model: usize, is_loaded: bool) {
        if is_loaded {
            self.change(model, |slot| slot.is_loaded = true);
        } else {
            self.slots.retain(|slot| slot.model != model);
        }
    }

    /// Ends a request for which [`Self::request`] returned [`SlotReply::Loaded`].
    pub(super) fn end(&mut self, model: usize) {
        self.change(model, |slot| slot.in_flight -= 1);
    }

    fn change(&mut self, model: usize, change: impl FnOnce(&mut ModelSlot)) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.model == model) {
            change(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SlotReply::{Load, Loaded, Wait};

    /// Returns two slots with the models 0 and 1, which have no requests.
    fn two_loaded() -> ModelSlots {
        let mut slots = ModelSlots::new(2);
        for model in [0, 1] {
            assert_eq!(slots.request(model), Load { evicted: None });
            slots.finish_load(model, true);
        }
        slots
    }

    #[test]
    fn the_least_recently_used_model_leaves() {
        let mut slots = two_loaded();
        assert_eq!(slots.request(0), Loaded);
        slots.end(0);
        assert_eq!(slots.request(2), Load { evicted: Some(1) });
        slots.finish_load(2, true);
        slots.finish_unload(1);
        assert_eq!(slots.request(1), Load { evicted: Some(0) });
    }

    #[test]
    fn a_model_with_requests_in_flight_stays() {
        let mut slots = two_loaded();
        assert_eq!(slots.request(0), Loaded);
        assert_eq!(slots.request(0), Loaded);
        slots.end(0);
        assert_eq!(slots.request(1), Loaded);
        assert_eq!(slots.request(2), Wait);
        slots.end(0);
        assert_eq!(slots.request(2), Load { evicted: Some(0) });
    }

    #[test]
    fn one_request_loads_and_others_wait() {
        let mut slots = two_loaded();
        assert_eq!(slots.request(2), Load { evicted: Some(0) });
        assert_eq!(slots.request(2), Wait);
        assert_eq!(slots.request(3), Load { evicted: Some(1) });
        assert_eq!(slots.request(4), Wait, "models that load stay");
        slots.finish_load(2, true);
        assert_eq!(slots.request(2), Loaded);
    }

    #[test]
    fn a_model_that_leaves_is_loaded_only_after_its_unload() {
        let mut slots = two_loaded();
        assert_eq!(slots.request(2), Load { evicted: Some(0) });
        assert_eq!(slots.request(0), Wait);
        slots.finish_unload(0);
        assert_eq!(slots.request(0), Load { evicted: Some(1) });
    }

    #[test]
    fn a_failed_load_frees_its_slot() {
        let mut slots = two_loaded();
        assert_eq!(slots.request(2), Load { evicted: Some(0) });
        slots.finish_load(2, false);
        assert_eq!(slots.request(3), Load { evicted: None });
    }
}
