//! Warm-ups take SMs themselves: on a GPU that is overloaded they come one at a time, and those that nobody waits for not at all.

use shadowslice_shared::units::Sms;

use super::super::{Facts, Live, Terms};

/// What may warm up on each GPU.
#[derive(Debug)]
pub(super) struct Pacing {
    gpus: Vec<WarmUps>,
}

/// Those of one GPU.
#[derive(Debug)]
struct WarmUps {
    overloaded: bool,
    under_way: bool,
}

impl Pacing {
    pub(super) fn of(overloaded: &[bool], terms: &[Terms], facts: &Facts) -> Self {
        let mut gpus: Vec<WarmUps> =
            overloaded.iter().map(|&overloaded| WarmUps { overloaded, under_way: false }).collect();
        for (terms, live) in terms.iter().zip(&facts.models) {
            gpus[terms.gpu].under_way |= live.coming.is_some();
        }
        Self { gpus }
    }

    /// Whether a hand-over may begin there now for which a worker must start; if so, one does.
    pub(super) fn admits(&mut self, gpu: usize) -> bool {
        let gpu = &mut self.gpus[gpu];
        let admits = !(gpu.overloaded && gpu.under_way);
        gpu.under_way |= admits;
        admits
    }

    /// The worker that may stand ready, of the one that is wanted: in overload only one that does.
    pub(super) fn standby(&self, gpu: usize, live: &Live, wanted: Option<Sms>) -> Option<Sms> {
        wanted.filter(|_| !self.gpus[gpu].overloaded || live.standing == wanted)
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Moment;

    use super::super::super::fixtures::{live, terms};
    use super::*;

    fn pacing(overloaded: bool, coming: Option<Sms>) -> Pacing {
        let one = Live { coming, ..live(Sms(40)) };
        let facts = Facts { now: Moment::default(), gpus: vec![Sms(132); 2], models: vec![one] };
        Pacing::of(&[overloaded, false], &[terms("a", 50)], &facts)
    }

    #[test]
    fn in_overload_one_worker_under_way_at_a_time() {
        let mut paced = pacing(true, None);
        assert_eq!([0, 0, 1, 1].map(|gpu| paced.admits(gpu)), [true, false, true, true]);
        assert!(!pacing(true, Some(Sms(66))).admits(0));
        let mut calm = pacing(false, Some(Sms(66)));
        assert!(calm.admits(0) && calm.admits(0));
    }

    #[test]
    fn in_overload_nobody_is_made_to_stand_ready() {
        let stands = Live { standing: Some(Sms(132)), ..live(Sms(40)) };
        let wanted = Some(Sms(132));
        assert_eq!(pacing(true, None).standby(0, &live(Sms(40)), wanted), None);
        assert_eq!(pacing(true, None).standby(0, &stands, wanted), wanted);
        assert_eq!(pacing(false, None).standby(0, &live(Sms(40)), wanted), wanted);
    }
}
