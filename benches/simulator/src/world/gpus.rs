//! How fast each worker executes.
//!
//! **Contention**: workers that may use the same SMs take turns, as was measured on a real GPU
//! ([`shadowslice_shared::contention`]), on the emulated device as here; or they divide the GPU in proportion
//! ([`contention`](super::contention)), or have the whole of it in slices of time, as without MPS.
//!
//! **Bandwidth**, which no cap divides: a batch that takes `t` now, and would take `t_whole` on the
//! whole GPU, asks for the part `d = bandwidth · t_whole / t` of the memory bandwidth, because the
//! bytes that it moves do not depend on its share. Where the parts sum to `D > 1`, the part `d` of
//! its time, in which a batch waits for memory, is stretched by `D`: the batch takes `t · (1 + d·(D
//! − 1))`. The emulated device does not model bandwidth, so this can be turned off.

use std::time::Duration;

use shadowslice_shared::contention::{Occupant, SharedGpu};
use shadowslice_shared::profile::Profile;

use super::{Sharing, contention};
use crate::timers::Timers;

#[derive(Debug)]
pub(super) struct Gpus<'a> {
    gpus: Vec<Shared>,
    seats: Vec<Seat<'a>>,
    rules: Rules,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) sharing: Sharing,
    /// Workers slow each other down by needing the same memory bandwidth.
    pub(super) interference: bool,
}

#[derive(Debug)]
struct Shared {
    gpu: SharedGpu,
    /// The parts of the bandwidth that batches ask for, summed.
    demand: f64,
    occupied: Vec<usize>,
    /// How many times the bandwidth is asked for; 1 if it is enough.
    crowding: f64,
}

#[derive(Debug)]
struct Seat<'a> {
    gpu: usize,
    profile: &'a Profile,
    granted: Occupant,
    /// Fires when the seat's batch is through.
    timer: usize,
    /// The SMs of the batch that executes, or of the last one while the seat is kept; else none.
    occupant: Option<Occupant>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    rows: u32,
    noise: f64,
    started: u64,
    /// Up to when the part done was counted.
    at: u64,
    /// 0 to 1.
    done: f64,
    /// What the whole batch takes at the present speed, in ns.
    whole: f64,
    demand: f64,
}

impl<'a> Gpus<'a> {
    pub(super) fn new(gpus: impl Iterator<Item = SharedGpu>, rules: Rules) -> Self {
        let shared = |gpu| Shared { gpu, demand: 0.0, occupied: Vec::new(), crowding: 1.0 };
        Self { gpus: gpus.map(shared).collect(), seats: Vec::new(), rules }
    }

    pub(super) fn gpu(&self, gpu: usize) -> &SharedGpu {
        &self.gpus[gpu].gpu
    }

    /// `timer` will say when the seat's batches are through.
    pub(super) fn add_seat(
        &mut self,
        gpu: usize,
        profile: &'a Profile,
        granted: Occupant,
        timer: usize,
    ) -> usize {
        self.seats.push(Seat { gpu, profile, granted, timer, occupant: None, running: None });
        self.seats.len() - 1
    }

    /// The seat keeps its client priority.
    pub(super) fn grant(&mut self, seat: usize, granted: Occupant) {
        let seat = &mut self.seats[seat];
        seat.granted = granted.with_priority(seat.granted.priority);
    }

    /// No batch executes at the seat.
    pub(super) fn start(&mut self, seat: usize, rows: u32, noise: f64, now: u64, timers: &mut Timers) {
        let Self { gpus, seats, rules } = self;
        let shared = &mut gpus[seats[seat].gpu];
        let (before, occupant) = seats[seat].begin(rows, noise, now);
        if before.is_none() {
            shared.occupied.push(seat);
        }
        let same = before == Some(occupant) || shared.occupied.len() == 1;
        if same {
            let (base, demand) = shared.needs(seats, seat, *rules);
            shared.demand += demand;
            seats[seat].proceed(base, demand, shared.crowding, now, timers);
        }
        shared.settle(seats, *rules, same, now, timers);
    }

    /// Returns how long the batch executed. The seat is kept for the next batch.
    pub(super) fn finish(&mut self, seat: usize, now: u64, timers: &mut Timers) -> Duration {
        let seat = &mut self.seats[seat];
        timers.set(seat.timer, crate::time::NEVER);
        let Some(batch) = seat.running.take() else { return Duration::ZERO };
        self.gpus[seat.gpu].demand -= batch.demand;
        Duration::from_nanos(now - batch.started)
    }

    /// No batch follows the last one: the SMs are left to others.
    pub(super) fn leave(&mut self, seat: usize, now: u64, timers: &mut Timers) {
        let Self { gpus, seats, rules } = self;
        let shared = &mut gpus[seats[seat].gpu];
        if seats[seat].occupant.take().is_some() {
            shared.occupied.retain(|&other| other != seat);
            shared.settle(seats, *rules, false, now, timers);
        }
    }
}

impl Shared {
    /// Sets all speeds anew, unless the occupants stay the `same` and so does the bandwidth.
    fn settle(&mut self, seats: &mut [Seat<'_>], rules: Rules, same: bool, now: u64, timers: &mut Timers) {
        if same && self.crowding == self.demand.max(1.0) {
            return;
        }
        // What batches ask for depends on their speeds without the crowding.
        if rules.interference {
            self.demand = self.occupied.iter().map(|&seat| self.needs(seats, seat, rules).1).sum();
            self.crowding = self.demand.max(1.0);
        }
        for &seat in &self.occupied {
            let (base, demand) = self.needs(seats, seat, rules);
            seats[seat].proceed(base, demand, self.crowding, now, timers);
        }
    }

    /// In ns, and the bandwidth that the batch then asks for.
    fn needs(&self, seats: &[Seat<'_>], seat: usize, rules: Rules) -> (f64, f64) {
        let (Some(batch), Some(own)) = (&seats[seat].running, seats[seat].occupant) else {
            return (1.0, 0.0);
        };
        let Profile { execution, bandwidth, .. } = seats[seat].profile;
        let others = self.occupied.iter().filter(|&&other| other != seat);
        let others = others.filter_map(|&other| seats[other].occupant);
        let base = match rules.sharing {
            Sharing::Turns => self.gpu.time(execution, batch.rows, own, others),
            Sharing::Proportional => contention::time(&self.gpu, execution, batch.rows, own, others),
            Sharing::Slices => {
                let all = f64::from(self.gpu.sms.0);
                execution.time(batch.rows, all).mul_f64(1.0 + others.count() as f64)
            }
        };
        let base = base.as_nanos().max(1) as f64;
        if !rules.interference {
            return (base, 0.0);
        }
        let whole = execution.time(batch.rows, f64::from(self.gpu.sms.0)).as_nanos() as f64;
        (base, bandwidth * whole / base)
    }
}

impl Seat<'_> {
    /// Returns what occupied the seat before the batch, and what occupies it now.
    fn begin(&mut self, rows: u32, noise: f64, now: u64) -> (Option<Occupant>, Occupant) {
        let occupant = self.granted.executing(&self.profile.execution, rows);
        // As slow as can be, so that the next speed sets the timer in any case.
        let (done, whole, demand) = (0.0, f64::INFINITY, 0.0);
        self.running = Some(Running { rows, noise, started: now, at: now, done, whole, demand });
        (self.occupant.replace(occupant), occupant)
    }

    fn proceed(&mut self, base: f64, demand: f64, crowding: f64, now: u64, timers: &mut Timers) {
        let Some(batch) = &mut self.running else { return };
        let whole = base * batch.noise * (1.0 + demand * (crowding - 1.0));
        batch.demand = demand;
        // While the speed stays the same, nothing is rounded.
        if whole != batch.whole {
            batch.done += (now - batch.at) as f64 / batch.whole;
            batch.at = now;
            batch.whole = whole;
            let left = ((1.0 - batch.done).max(0.0) * whole).round() as u64;
            timers.set(self.timer, now.saturating_add(left));
        }
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Sms;

    use super::*;
    use crate::scenario::fixtures::profile;

    const MS: u64 = 1_000_000;

    /// Seats on a GPU of 100 SMs, with a timer each.
    fn seats<'a>(profiles: &[(&'a Profile, u32)], interference: bool) -> (Gpus<'a>, Timers) {
        under(profiles, Rules { sharing: Sharing::Proportional, interference })
    }

    fn under<'a>(profiles: &[(&'a Profile, u32)], rules: Rules) -> (Gpus<'a>, Timers) {
        let mut gpus = Gpus::new(std::iter::once(SharedGpu::new(Sms(100))), rules);
        for (timer, &(profile, sms)) in profiles.iter().enumerate() {
            gpus.add_seat(0, profile, Occupant::anywhere(Sms(sms)), timer);
        }
        (gpus, Timers::new(profiles.len()))
    }

    #[test]
    fn caps_that_fit_slow_nobody() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 25)], false);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 10 * MS));
        assert_eq!(gpus.finish(0, 10 * MS, &mut timers), Duration::from_millis(10));
        gpus.leave(0, 10 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (1, 20 * MS));
    }

    #[test]
    fn contention_slows_in_proportion_and_only_while_it_lasts() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 75)], false);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        // From 4 ms on the batch has 40 SMs instead of 50: its other 6 ms take 7.5 ms.
        gpus.start(1, 1, 1.0, 4 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 11_500_000));
        gpus.finish(0, 11_500_000, &mut timers);
        gpus.leave(0, 11_500_000, &mut timers);
        // 60 of 75 SMs were enough for the other batch.
        assert_eq!((timers.first(), timers.due()), (1, 14 * MS));
    }

    #[test]
    fn a_seat_is_kept_between_batches() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 100)], false);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        // The shares are one and two thirds of the GPU: 15 and 10 ms.
        assert_eq!((timers.first(), timers.due()), (1, 10 * MS));
        gpus.finish(1, 10 * MS, &mut timers);
        gpus.start(1, 1, 1.0, 10 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 15 * MS));
    }

    #[test]
    fn too_much_bandwidth_stretches_the_part_that_waits_for_it() {
        let mut profile = profile(10.0);
        profile.bandwidth = 0.8;
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 50)], true);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 10 * MS);
        // Together they ask for 1.6 of the bandwidth: 0.8 of each batch's time takes 1.6 times as
        // long.
        gpus.start(1, 1, 1.0, 5 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 5 * MS + 7_400_000));
        gpus.finish(0, 12_400_000, &mut timers);
        gpus.leave(0, 12_400_000, &mut timers);
        assert_eq!((timers.first(), timers.due()), (1, 17_400_000));
    }

    #[test]
    fn half_the_speed_asks_for_half_the_bandwidth() {
        let mut profile = profile(10.0);
        profile.bandwidth = 0.8;
        let (mut gpus, mut timers) = seats(&[(&profile, 25), (&profile, 25)], true);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 20 * MS, "0.4 and 0.4: enough for both");
    }

    #[test]
    fn turns_are_waited_for_while_others_execute() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = under(
            &[(&profile, 100), (&profile, 100)],
            Rules { sharing: Sharing::Turns, interference: false },
        );
        gpus.start(0, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 10 * MS);
        gpus.start(1, 1, 1.0, 5 * MS, &mut timers);
        let due = timers.due();
        assert!(due > 12 * MS && due < 15 * MS, "{due}");
        gpus.finish(0, due, &mut timers);
        gpus.leave(0, due, &mut timers);
        assert!(timers.due() > 15 * MS && timers.due() < 20 * MS, "{}", timers.due());
    }

    #[test]
    fn a_batch_of_a_nanosecond_is_through_after_it() {
        let profile = profile(1e-6);
        let (mut gpus, mut timers) = seats(&[(&profile, 50)], true);
        gpus.start(0, 1, 1.0, MS, &mut timers);
        assert_eq!(timers.due(), MS + 1);
    }

    #[test]
    fn a_batch_that_takes_for_ever_is_never_through() {
        let profile = profile(999_999.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50)], true);
        gpus.start(0, u32::MAX, f64::MAX, MS, &mut timers);
        assert_eq!(timers.due(), u64::MAX);
    }

    #[test]
    fn noise_is_a_factor() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50)], false);
        gpus.start(0, 2, 1.1, 0, &mut timers);
        assert_eq!(timers.due(), 22 * MS);
    }
}
