//! The GPUs of the simulated world. They determine how fast each worker executes.
//!
//! **Contention**: kernels of workers that may use the same SMs take turns, as measured on real
//! GPUs ([`shadowslice_shared::contention`]). The emulated device uses the same model. In other
//! simulated worlds, workers divide the GPU in proportion ([`contention`](super::contention)) or in
//! time slices, as without MPS.
//!
//! **Bandwidth**: shares do not divide the memory bandwidth. A batch takes `t` at its share and
//! `t_whole` on the whole GPU. It moves the same bytes in both cases, so it needs this fraction of
//! the memory bandwidth: `d = bandwidth · t_whole / t`. If the fractions of all batches sum to
//! `D > 1`, the memory-bound part `d` of the time takes `D` times as long. The batch then takes
//! `t · (1 + d·(D − 1))`. The emulated device does not model bandwidth, so the simulator can turn
//! this effect off.

use std::time::Duration;

use shadowslice_shared::contention::{Occupant, SharedGpu};
use shadowslice_shared::profile::Profile;

use super::seats::{GpuSeat, SeatStep};
use super::tally::PauseTally;
use super::{GpuSharing, contention};
use crate::timers::Timers;

/// All GPUs, with a seat for each worker.
#[derive(Debug)]
pub(super) struct WorldGpus<'a> {
    gpus: Vec<SimulatedGpu>,
    seats: Vec<GpuSeat<'a>>,
    rules: GpuRules,
}

/// The rules that determine how much workers slow each other down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuRules {
    pub(super) sharing: GpuSharing,
    /// True if workers slow each other down by contention for memory bandwidth.
    pub(super) interference: bool,
}

#[derive(Debug)]
struct SimulatedGpu {
    gpu: SharedGpu,
    /// The sum of the fractions of the memory bandwidth that all batches need.
    demand: f64,
    /// The seats that have an occupant.
    occupied: Vec<usize>,
    /// The demand for memory bandwidth divided by the available memory bandwidth, at least 1.
    oversubscription: f64,
}

impl<'a> WorldGpus<'a> {
    pub(super) fn new(gpus: impl Iterator<Item = SharedGpu>, rules: GpuRules) -> Self {
        let shared = |gpu| SimulatedGpu { gpu, demand: 0.0, occupied: Vec::new(), oversubscription: 1.0 };
        Self { gpus: gpus.map(shared).collect(), seats: Vec::new(), rules }
    }

    pub(super) fn gpu(&self, gpu: usize) -> &SharedGpu {
        &self.gpus[gpu].gpu
    }

    /// Adds a seat, and returns its index. `timer` is the timer that fires when a batch at the seat
    /// ends.
    pub(super) fn add_seat(
        &mut self,
        gpu: usize,
        profile: &'a Profile,
        granted: Occupant,
        timer: usize,
    ) -> usize {
        self.seats.push(GpuSeat::new(gpu, profile, granted, timer));
        self.seats.len() - 1
    }

    /// Changes the SMs that a seat may use. The seat keeps its client priority.
    pub(super) fn grant(&mut self, seat: usize, granted: Occupant) {
        let seat = &mut self.seats[seat];
        seat.granted = granted.with_priority(seat.granted.priority);
    }

    /// Starts a batch at a seat that is not executing a batch.
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
            seats[seat].proceed(base, demand, shared.oversubscription, now, timers);
        }
        shared.settle(seats, *rules, same, now, timers);
    }

    /// Handles the timer of a seat. If the seat's batch has ended, returns the batch's execution time,
    /// which includes its pauses. The seat then stays occupied for the next batch.
    pub(super) fn progress(&mut self, seat: usize, now: u64, timers: &mut Timers) -> Option<Duration> {
        match self.seats[seat].step() {
            SeatStep::End => return Some(self.finish(seat, now, timers)),
            SeatStep::Wait => self.wait(seat, now, timers),
            SeatStep::Resume => self.release(seat, now, timers),
        }
        None
    }

    /// Ends the batch at a seat, and returns the batch's execution time.
    fn finish(&mut self, seat: usize, now: u64, timers: &mut Timers) -> Duration {
        let seat = &mut self.seats[seat];
        timers.set(seat.timer, crate::time::NEVER);
        let Some(batch) = seat.batch.take() else { return Duration::ZERO };
        self.gpus[seat.gpu].demand -= batch.demand;
        Duration::from_nanos(now - batch.started)
    }

    /// Frees a seat after its last batch, so that other workers can use its SMs.
    pub(super) fn leave(&mut self, seat: usize, now: u64, timers: &mut Timers) {
        let Self { gpus, seats, rules } = self;
        let shared = &mut gpus[seats[seat].gpu];
        if seats[seat].occupant.take().is_some() {
            shared.occupied.retain(|&other| other != seat);
            shared.settle(seats, *rules, false, now, timers);
        }
    }

    /// Stops the batch at a seat at its next border between two pieces, or the next batch before its
    /// first piece.
    pub(super) fn pause(&mut self, seat: usize, now: u64, timers: &mut Timers) {
        self.seats[seat].pause(now, timers);
    }

    /// Ends the pause of a seat. Its batch continues if it waits.
    pub(super) fn release(&mut self, seat: usize, now: u64, timers: &mut Timers) {
        let Self { gpus, seats, rules } = self;
        if seats[seat].release(timers) {
            let shared = &mut gpus[seats[seat].gpu];
            seats[seat].resume(now);
            shared.occupied.push(seat);
            shared.settle(seats, *rules, false, now, timers);
        }
    }

    /// Lets the batch at a seat wait. Meanwhile, other workers can use its SMs.
    fn wait(&mut self, seat: usize, now: u64, timers: &mut Timers) {
        let Self { gpus, seats, rules } = self;
        let shared = &mut gpus[seats[seat].gpu];
        seats[seat].wait(now, timers);
        shared.occupied.retain(|&other| other != seat);
        shared.settle(seats, *rules, false, now, timers);
    }

    /// Returns the pauses of the batches at a seat since the start.
    pub(super) fn pauses(&self, seat: usize) -> PauseTally {
        self.seats[seat].pauses
    }
}

impl SimulatedGpu {
    /// Updates the speeds of all batches. Does nothing if neither the occupants nor the
    /// oversubscription of the bandwidth have changed. `same` is true if the occupants have not
    /// changed.
    fn settle(
        &mut self,
        seats: &mut [GpuSeat<'_>],
        rules: GpuRules,
        same: bool,
        now: u64,
        timers: &mut Timers,
    ) {
        if same && self.oversubscription == self.demand.max(1.0) {
            return;
        }
        // The demand is computed first, because it depends on the speeds without oversubscription.
        if rules.interference {
            self.demand = self.occupied.iter().map(|&seat| self.needs(seats, seat, rules).1).sum();
            self.oversubscription = self.demand.max(1.0);
        }
        for &seat in &self.occupied {
            let (base, demand) = self.needs(seats, seat, rules);
            seats[seat].proceed(base, demand, self.oversubscription, now, timers);
        }
    }

    /// Returns the time of a seat's batch without oversubscription, in ns, and the fraction of the
    /// memory bandwidth that the batch needs.
    fn needs(&self, seats: &[GpuSeat<'_>], seat: usize, rules: GpuRules) -> (f64, f64) {
        let (Some(batch), Some(own)) = (&seats[seat].batch, seats[seat].occupant) else {
            return (1.0, 0.0);
        };
        let Profile { execution, bandwidth, .. } = seats[seat].profile;
        let others = self.occupied.iter().filter(|&&other| other != seat);
        let others = others.filter_map(|&other| seats[other].occupant);
        let base = match rules.sharing {
            GpuSharing::Turns => self.gpu.time(execution, batch.rows, own, others),
            GpuSharing::Proportional => contention::time(&self.gpu, execution, batch.rows, own, others),
            GpuSharing::Slices => {
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

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Sms;

    use super::*;
    use crate::scenario::fixtures::profile;

    const MS: u64 = 1_000_000;

    /// Returns seats on a GPU with 100 SMs, each with its own timer.
    fn seats<'a>(profiles: &[(&'a Profile, u32)], interference: bool) -> (WorldGpus<'a>, Timers) {
        under(profiles, GpuRules { sharing: GpuSharing::Proportional, interference })
    }

    fn under<'a>(profiles: &[(&'a Profile, u32)], rules: GpuRules) -> (WorldGpus<'a>, Timers) {
        let mut gpus = WorldGpus::new(std::iter::once(SharedGpu::new(Sms(100))), rules);
        for (timer, &(profile, sms)) in profiles.iter().enumerate() {
            gpus.add_seat(0, profile, Occupant::anywhere(Sms(sms)), timer);
        }
        (gpus, Timers::new(profiles.len()))
    }

    #[test]
    fn caps_that_fit_cause_no_contention() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 25)], false);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 10 * MS));
        assert_eq!(gpus.progress(0, 10 * MS, &mut timers), Some(Duration::from_millis(10)));
        gpus.leave(0, 10 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (1, 20 * MS));
    }

    #[test]
    fn contention_slows_in_proportion_while_it_lasts() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 75)], false);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        // After 4 ms, the first batch has 40 SMs instead of 50. Its remaining 6 ms therefore take
        // 7.5 ms.
        gpus.start(1, 1, 1.0, 4 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 11_500_000));
        assert!(gpus.progress(0, 11_500_000, &mut timers).is_some());
        gpus.leave(0, 11_500_000, &mut timers);
        // The second batch had 60 SMs instead of 75. It is not slower, because it can use at most
        // 50 SMs.
        assert_eq!((timers.first(), timers.due()), (1, 14 * MS));
    }

    #[test]
    fn a_seat_is_kept_between_batches() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 100)], false);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        // The workers get one third and two thirds of the GPU. Their batches therefore take 15 ms
        // and 10 ms.
        assert_eq!((timers.first(), timers.due()), (1, 10 * MS));
        assert!(gpus.progress(1, 10 * MS, &mut timers).is_some());
        gpus.start(1, 1, 1.0, 10 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 15 * MS));
    }

    #[test]
    fn oversubscribed_bandwidth_stretches_the_memory_bound_part() {
        let mut profile = profile(10.0);
        profile.bandwidth = 0.8;
        let (mut gpus, mut timers) = seats(&[(&profile, 50), (&profile, 50)], true);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 10 * MS);
        // The two batches together need 1.6 times the available bandwidth, so 0.8 of each batch's
        // time takes 1.6 times as long.
        gpus.start(1, 1, 1.0, 5 * MS, &mut timers);
        assert_eq!((timers.first(), timers.due()), (0, 5 * MS + 7_400_000));
        assert!(gpus.progress(0, 12_400_000, &mut timers).is_some());
        gpus.leave(0, 12_400_000, &mut timers);
        assert_eq!((timers.first(), timers.due()), (1, 17_400_000));
    }

    #[test]
    fn half_the_speed_needs_half_the_bandwidth() {
        let mut profile = profile(10.0);
        profile.bandwidth = 0.8;
        let (mut gpus, mut timers) = seats(&[(&profile, 25), (&profile, 25)], true);
        gpus.start(0, 1, 1.0, 0, &mut timers);
        gpus.start(1, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 20 * MS, "the bandwidth is enough for 0.4 and 0.4");
    }

    #[test]
    fn kernels_of_overlapping_workers_take_turns() {
        let profile = profile(10.0);
        let (mut gpus, mut timers) = under(
            &[(&profile, 100), (&profile, 100)],
            GpuRules { sharing: GpuSharing::Turns, interference: false },
        );
        gpus.start(0, 1, 1.0, 0, &mut timers);
        assert_eq!(timers.due(), 10 * MS);
        gpus.start(1, 1, 1.0, 5 * MS, &mut timers);
        let due = timers.due();
        assert!(due > 12 * MS && due < 15 * MS, "{due}");
        assert!(gpus.progress(0, due, &mut timers).is_some());
        gpus.leave(0, due, &mut timers);
        assert!(timers.due() > 15 * MS && timers.due() < 20 * MS, "{}", timers.due());
    }

    #[test]
    fn a_batch_of_a_nanosecond_ends_after_it() {
        let profile = profile(1e-6);
        let (mut gpus, mut timers) = seats(&[(&profile, 50)], true);
        gpus.start(0, 1, 1.0, MS, &mut timers);
        assert_eq!(timers.due(), MS + 1);
    }

    #[test]
    fn an_infinite_batch_never_ends() {
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
