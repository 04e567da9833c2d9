//! The seats of the simulated GPUs: the progress of each worker's batch, and its pauses.
//!
//! As on the emulated device, a pause stops a batch at its next border between two pieces, or before its
//! first piece. While a batch waits, its worker occupies no SMs, and the batch makes no progress.

use shadowslice_shared::contention::Occupant;
use shadowslice_shared::pause::{MAX_BATCH_PAUSE, pieces};
use shadowslice_shared::profile::Profile;

use super::tally::PauseTally;
use crate::time::ns;
use crate::timers::Timers;

/// The seat of a worker on a GPU.
#[derive(Debug)]
pub(super) struct GpuSeat<'a> {
    pub(super) gpu: usize,
    pub(super) profile: &'a Profile,
    /// The SMs that the worker may use.
    pub(super) granted: Occupant,
    /// The timer that fires when the seat's batch ends, when it reaches the border at which it waits,
    /// or when its pause expires.
    pub(super) timer: usize,
    /// The SMs of the current batch or, between two batches, of the last batch. `None` if the
    /// worker does not occupy its seat.
    pub(super) occupant: Option<Occupant>,
    pub(super) batch: Option<SeatBatch>,
    /// True while no piece of the worker may begin.
    is_paused: bool,
    pub(super) pauses: PauseTally,
}

/// The batch that a seat executes.
#[derive(Debug)]
pub(super) struct SeatBatch {
    pub(super) rows: u32,
    noise: f64,
    pub(super) started: u64,
    /// The time for which `done` is valid, in ns.
    at: u64,
    /// The completed fraction of the batch, from 0 to 1.
    done: f64,
    /// The fraction at which the batch ends or waits, from 0 to 1.
    stop: f64,
    /// The duration of the whole batch at its current speed, in ns. Infinite while the batch waits.
    whole: f64,
    /// The fraction of the memory bandwidth that the batch needs.
    pub(super) demand: f64,
    /// The wait between two pieces, or `None` while the batch executes.
    wait: Option<PauseWait>,
}

#[derive(Debug, Clone, Copy)]
struct PauseWait {
    since: u64,
    /// The SMs to which the batch returns.
    occupant: Occupant,
}

/// The next step of a seat's batch when its timer fires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeatStep {
    /// The batch has ended.
    End,
    /// The batch waits from now on.
    Wait,
    /// The batch has waited for the longest time of a pause, and continues.
    Resume,
}

impl SeatBatch {
    /// Returns the time at which the batch ends or waits at its current speed.
    fn stops_at(&self) -> u64 {
        let left = ((self.stop - self.done).max(0.0) * self.whole).round() as u64;
        self.at.saturating_add(left)
    }

    /// Returns the fraction at which the piece that executes now ends.
    fn border(&self, pieces: u32, now: u64) -> f64 {
        let pieces = f64::from(pieces);
        let done = self.done + (now - self.at) as f64 / self.whole;
        (((done * pieces).floor() + 1.0) / pieces).min(1.0)
    }
}

impl<'a> GpuSeat<'a> {
    pub(super) fn new(gpu: usize, profile: &'a Profile, granted: Occupant, timer: usize) -> Self {
        let (occupant, batch, is_paused, pauses) = (None, None, false, PauseTally::default());
        Self { gpu, profile, granted, timer, occupant, batch, is_paused, pauses }
    }

    /// Records the start of a batch. Returns the seat's occupant before the batch, and its occupant
    /// during the batch.
    pub(super) fn begin(&mut self, rows: u32, noise: f64, now: u64) -> (Option<Occupant>, Occupant) {
        let occupant = self.granted.executing(&self.profile.execution, rows);
        // The duration is infinite here, so that the first update of the speed always sets the
        // timer.
        let (done, whole, demand, wait) = (0.0, f64::INFINITY, 0.0, None);
        let stop = if self.is_paused { 0.0 } else { 1.0 };
        self.batch = Some(SeatBatch { rows, noise, started: now, at: now, done, stop, whole, demand, wait });
        (self.occupant.replace(occupant), occupant)
    }

    /// Updates the speed of the batch and the batch's timer.
    pub(super) fn proceed(
        &mut self,
        base: f64,
        demand: f64,
        oversubscription: f64,
        now: u64,
        timers: &mut Timers,
    ) {
        let Some(batch) = &mut self.batch else { return };
        let whole = base * batch.noise * (1.0 + demand * (oversubscription - 1.0));
        batch.demand = demand;
        // If the speed is the same, the timer does not change, which avoids rounding errors.
        if whole != batch.whole {
            batch.done += (now - batch.at) as f64 / batch.whole;
            batch.at = now;
            batch.whole = whole;
            timers.set(self.timer, batch.stops_at());
        }
    }

    /// Stops the batch at its next border, or the next batch before its first piece.
    pub(super) fn pause(&mut self, now: u64, timers: &mut Timers) {
        if std::mem::replace(&mut self.is_paused, true) {
            return;
        }
        let executing = self.batch.as_mut().filter(|batch| batch.wait.is_none());
        if let (Some(batch), Some(occupant)) = (executing, self.occupant) {
            let alone = self.profile.execution.time(batch.rows, f64::from(occupant.sms.0));
            batch.stop = batch.border(pieces(alone), now);
            timers.set(self.timer, batch.stops_at());
        }
    }

    /// Ends the pause. Returns true if the batch waits, so that it must [resume](Self::resume).
    pub(super) fn release(&mut self, timers: &mut Timers) -> bool {
        let was_paused = std::mem::replace(&mut self.is_paused, false);
        let Some(batch) = self.batch.as_mut().filter(|_| was_paused) else { return false };
        batch.stop = 1.0;
        if batch.wait.is_none() {
            timers.set(self.timer, batch.stops_at());
        }
        batch.wait.is_some()
    }

    /// Returns what the batch does when the seat's timer fires.
    pub(super) fn step(&self) -> SeatStep {
        match &self.batch {
            Some(SeatBatch { wait: Some(_), .. }) => SeatStep::Resume,
            Some(SeatBatch { stop, .. }) if *stop < 1.0 => SeatStep::Wait,
            _ => SeatStep::End,
        }
    }

    /// Lets the batch wait at its border, for at most the longest time of a pause.
    pub(super) fn wait(&mut self, now: u64, timers: &mut Timers) {
        let Some((batch, occupant)) = self.batch.as_mut().zip(self.occupant.take()) else { return };
        (batch.done, batch.at, batch.whole, batch.demand) = (batch.stop, now, f64::INFINITY, 0.0);
        batch.wait = Some(PauseWait { since: now, occupant });
        timers.set(self.timer, now.saturating_add(ns(MAX_BATCH_PAUSE)));
    }

    /// Returns the batch to its SMs after a wait. The next update of the speed sets the timer.
    pub(super) fn resume(&mut self, now: u64) {
        let Some(wait) = self.batch.as_mut().and_then(|batch| batch.wait.take()) else { return };
        self.occupant = Some(wait.occupant);
        self.pauses.add(now - wait.since);
    }
}
