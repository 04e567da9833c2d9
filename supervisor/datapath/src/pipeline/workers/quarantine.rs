//! The quarantine of inputs that are known to kill workers. Requests with these inputs are refused
//! for a while. After this time, one request with these inputs runs alone as a trial.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::backoff::Backoff;
use shadowslice_policy::blame;
use shadowslice_shared::units::Timestamp;

use crate::pipeline::requests::Reservation;

/// The largest number of requests whose inputs are in the quarantine. If there are more, the oldest
/// inputs are removed.
const MAX_KEPT: usize = 16;
/// The largest size of all inputs in the quarantine, in bytes. Larger inputs are not stored.
const MAX_BYTES: usize = 64 << 20;

/// The bounds of the pause before a trial.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    /// The inputs in quarantine. The newest are last.
    quarantined: VecDeque<QuarantinedInputs>,
    /// The inputs of streams during which workers recently died. The newest are last.
    suspects: VecDeque<SuspectInputs>,
}

#[derive(Debug)]
struct SuspectInputs {
    tensors: Vec<Vec<u8>>,
    deaths: u8,
    /// The time of the last death. Several streams of a step may have the same inputs.
    last: Timestamp,
}

#[derive(Debug)]
struct QuarantinedInputs {
    tensors: Vec<Vec<u8>>,
    until: Timestamp,
    /// The pause before a trial.
    pause: Backoff,
}

/// The decision about a request, which depends on its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    Free,
    /// The request is a trial. If its worker dies, the quarantine starts again with a longer pause.
    OnTrial,
    /// The request is refused. The value is the time until the quarantine ends.
    Refused(Duration),
}

impl Quarantine {
    pub(crate) fn admit(&mut self, inputs: &Reservation, now: Timestamp) -> Admission {
        match self.quarantined.iter_mut().find(|proved| inputs.holds(&proved.tensors)) {
            None => Admission::Free,
            Some(proved) if now < proved.until => Admission::Refused(proved.until.since(now)),
            Some(proved) => {
                proved.until = now + proved.pause.delay();
                Admission::OnTrial
            }
        }
    }

    /// Puts inputs into quarantine. If they were in quarantine before, the pause doubles.
    pub(crate) fn add(&mut self, inputs: &Reservation, now: Timestamp) {
        let before = self.take(inputs).map(|before| before.pause);
        let mut pause = before.unwrap_or(Backoff::new(FIRST_PAUSE, LONGEST_PAUSE));
        let until = now + pause.record_failure();
        let Some(tensors) = inputs.copy() else { return };
        self.quarantined.push_back(QuarantinedInputs { tensors, until, pause });
        while self.quarantined.len() > MAX_KEPT || (self.bytes() > MAX_BYTES && !self.quarantined.is_empty())
        {
            self.quarantined.pop_front();
        }
    }

    /// Returns true if a stream with these inputs must advance alone, because workers recently died in
    /// steps of streams with these inputs.
    pub(crate) fn is_suspect(&self, inputs: &Reservation) -> bool {
        self.suspects
            .iter()
            .any(|suspect| suspect.deaths >= blame::ON_TRIAL && inputs.holds(&suspect.tensors))
    }

    /// Records that a worker died in a step of a stream with these inputs. The step cannot be
    /// retried. Returns whether this death proves that the inputs kill workers, which requires that the
    /// stream was alone in its step.
    pub(crate) fn record_death_in_step(
        &mut self,
        inputs: &Reservation,
        was_alone: bool,
        now: Timestamp,
    ) -> bool {
        let before = self.take_suspect(inputs).map_or(0, |suspect| match suspect.last == now {
            true => suspect.deaths - 1,
            false => suspect.deaths,
        });
        let known = self.quarantined.iter().any(|proved| inputs.holds(&proved.tensors));
        if was_alone && (known || before >= blame::ON_TRIAL) {
            self.add(inputs, now);
            return true;
        }
        let deaths = before.saturating_add(1).min(blame::ON_TRIAL);
        self.suspects.extend(inputs.copy().map(|tensors| SuspectInputs { tensors, deaths, last: now }));
        while self.suspects.len() > MAX_KEPT || (self.bytes() > MAX_BYTES && !self.suspects.is_empty()) {
            self.suspects.pop_front();
        }
        false
    }

    /// Removes inputs from the quarantine, because a request with these inputs was answered
    /// completely.
    pub(crate) fn lift(&mut self, inputs: &Reservation) {
        self.take(inputs);
        self.take_suspect(inputs);
    }

    fn take_suspect(&mut self, inputs: &Reservation) -> Option<SuspectInputs> {
        let place = self.suspects.iter().position(|suspect| inputs.holds(&suspect.tensors))?;
        self.suspects.remove(place)
    }

    fn take(&mut self, inputs: &Reservation) -> Option<QuarantinedInputs> {
        let place = self.quarantined.iter().position(|proved| inputs.holds(&proved.tensors))?;
        self.quarantined.remove(place)
    }

    fn bytes(&self) -> usize {
        let proved = self.quarantined.iter().map(|proved| &proved.tensors);
        proved.chain(self.suspects.iter().map(|suspect| &suspect.tensors)).flatten().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::pipeline::requests::Pieces;
    use crate::pipeline::requests::RequestMemory;

    fn inputs(memory: &Arc<RequestMemory>, tensors: &[&[u8]]) -> Reservation {
        let reserved = memory.reserve(tensors.iter().map(|tensor| tensor.len() as u64)).unwrap();
        for (index, tensor) in tensors.iter().enumerate() {
            reserved.fill(index, &Pieces::from(tensor.to_vec())).unwrap();
        }
        reserved
    }

    fn at(s: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_secs(s))
    }

    #[test]
    fn equal_inputs_are_refused_and_then_one_is_tried_at_a_time() {
        let memory = Arc::new(RequestMemory::create("test", 1 << 16).unwrap());
        let mut quarantine = Quarantine::default();
        let bad = inputs(&memory, &[b"bad", b"x"]);
        quarantine.add(&bad, at(0));
        let same = inputs(&memory, &[b"bad", b"x"]);
        assert_eq!(quarantine.admit(&same, at(0)), Admission::Refused(FIRST_PAUSE));
        for other in [&[&b"bad"[..], b"y"][..], &[b"ba", b"dx"], &[b"bad"]] {
            assert_eq!(quarantine.admit(&inputs(&memory, other), at(0)), Admission::Free);
        }
        assert_eq!(quarantine.admit(&same, at(1)), Admission::OnTrial);
        assert_eq!(quarantine.admit(&same, at(1)), Admission::Refused(FIRST_PAUSE), "one at a time");
        quarantine.add(&same, at(1));
        assert_eq!(quarantine.admit(&same, at(2)), Admission::Refused(FIRST_PAUSE));
        assert_eq!(quarantine.admit(&same, at(3)), Admission::OnTrial, "the pause has doubled");
        quarantine.lift(&same);
        assert_eq!(quarantine.admit(&bad, at(3)), Admission::Free);
    }

    #[test]
    fn inputs_of_several_streams_of_a_step_are_suspected_once_and_proved_alone() {
        let memory = Arc::new(RequestMemory::create("test", 1 << 16).unwrap());
        let mut quarantine = Quarantine::default();
        let bad = inputs(&memory, &[b"bad"]);
        for second in 1..=4 {
            assert_eq!(quarantine.is_suspect(&bad), second > 2, "after {} deaths", second - 1);
            for _ in 0..3 {
                assert!(!quarantine.record_death_in_step(&bad, false, at(second)), "others were there, too");
            }
        }
        assert!(quarantine.record_death_in_step(&bad, true, at(5)));
        assert_eq!(quarantine.admit(&bad, at(5)), Admission::Refused(FIRST_PAUSE));
        quarantine.lift(&bad);
        assert!(!quarantine.is_suspect(&bad));
    }

    #[test]
    fn it_is_bounded() {
        let memory = Arc::new(RequestMemory::create("test", 1 << 16).unwrap());
        let mut quarantine = Quarantine::default();
        for number in 0..=MAX_KEPT as u8 {
            quarantine.add(&inputs(&memory, &[&[number]]), at(0));
        }
        assert_eq!(quarantine.quarantined.len(), MAX_KEPT);
        assert_eq!(quarantine.admit(&inputs(&memory, &[&[0]]), at(0)), Admission::Free);
    }
}
