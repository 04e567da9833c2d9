//! Whether requests come in bursts: arrivals counted in short slots, of which a few seconds hold enough to tell.

use std::time::Duration;

use shadowslice_shared::units::Moment;

/// The length of a slot: long beside a host's jitter, short beside what a share needs to follow.
const SLOT: Duration = Duration::from_millis(50);

/// What the whole slots of an interval held.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Slots {
    slots: u32,
    arrived: f64,
    /// The sum of the squares of each slot's arrivals.
    squares: f64,
}

impl Slots {
    fn add(&mut self, arrived: u32, then_empty: u32) {
        let arrived = f64::from(arrived);
        self.slots = self.slots.saturating_add(1).saturating_add(then_empty);
        self.arrived += arrived;
        self.squares += arrived * arrived;
    }

    /// The requests in them.
    pub fn arrived(&self) -> f64 {
        self.arrived
    }

    /// The variance of arrivals about the interval's own mean, added up over the slots: as much as has [`arrived`](Self::arrived)
    /// where requests are independent; zero of fewer than two slots.
    pub fn variance(&self) -> f64 {
        if self.slots < 2 {
            return 0.0;
        }
        let slots = f64::from(self.slots);
        (self.squares - self.arrived * self.arrived / slots).max(0.0) * slots / (slots - 1.0)
    }
}

/// Counts arrivals by slot, from the first one on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SlotCounter {
    /// When the slot under way began.
    since: Option<Moment>,
    arrived: u32,
    done: Slots,
}

impl SlotCounter {
    /// A request comes.
    pub fn note(&mut self, now: Moment) {
        self.close(now);
        self.since.get_or_insert(now);
        self.arrived = self.arrived.saturating_add(1);
    }

    /// The slots that have ended since this was asked last.
    pub fn take(&mut self, now: Moment) -> Slots {
        self.close(now);
        std::mem::take(&mut self.done)
    }

    fn close(&mut self, now: Moment) {
        let Some(since) = self.since else { return };
        let elapsed = now.since(since);
        if elapsed < SLOT {
            return;
        }
        let ended = elapsed.as_nanos() / SLOT.as_nanos();
        let then_empty = u32::try_from(ended).unwrap_or(u32::MAX) - 1;
        self.done.add(self.arrived, then_empty);
        (self.since, self.arrived) = (Some(since + SLOT * (then_empty + 1)), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(ms))
    }

    fn counted(arrivals: &[u64], until: u64) -> Slots {
        let mut counter = SlotCounter::default();
        arrivals.iter().for_each(|&ms| counter.note(at(ms)));
        counter.take(at(until))
    }

    #[test]
    fn slots_begin_with_the_first_request_and_count_once_they_have_ended() {
        assert_eq!(counted(&[], 10_000), Slots::default());
        assert_eq!(counted(&[700, 749], 749), Slots::default());
        assert_eq!(counted(&[700, 749], 750), Slots { slots: 1, arrived: 2.0, squares: 4.0 });
        assert_eq!(counted(&[700, 750, 949], 950), Slots { slots: 5, arrived: 3.0, squares: 3.0 });
        let mut counter = SlotCounter::default();
        counter.note(at(0));
        assert_eq!(counter.take(at(60)).slots, 1);
        counter.note(at(70));
        assert_eq!(counter.take(at(100)), Slots { slots: 1, arrived: 1.0, squares: 1.0 });
    }

    #[test]
    fn bursts_vary_more_than_what_comes_evenly() {
        let even: Vec<u64> = (0..100).map(|n| n * 10).collect();
        assert_eq!(counted(&even, 1_000).variance(), 0.0);
        let bursts: Vec<u64> = (0..100).map(|n| n / 20 * 200).collect();
        let bursts = counted(&bursts, 1_000);
        assert!(bursts.variance() > 15.0 * bursts.arrived(), "{bursts:?}");
        assert_eq!(counted(&[0, 1], 50).variance(), 0.0, "one slot says nothing");
    }

    #[test]
    fn long_silence_is_many_empty_slots() {
        let silence = counted(&[0], u64::from(u32::MAX) * 100);
        assert_eq!((silence.slots, silence.arrived), (u32::MAX, 1.0));
    }
}
