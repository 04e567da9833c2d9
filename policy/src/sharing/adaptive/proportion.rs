//! Whether models of one priority have caps by what each of them needs.
//!
//! With the same caps, whoever has much to do within a short time has no more of the GPU than who has little to do or much time for it, while both
//! execute. So where a priority goes on missing its SLOs, those of its models that need less leave SMs to those that need more; that
//! stays if it helps. It takes a hand-over, so it is nothing for loads that change meanwhile: then all have the same again.
//!
//! What a model needs is the smallest share that carries its demand, or that part of all demands that fits onto the GPU. Caps in that
//! proportion would leave nobody more than his part of it even while the others rest, which generous ones do. They are half-way: the geometric
//! mean of both.

use std::collections::BTreeMap;

use shadowslice_shared::units::Sms;

use super::super::Terms;
use super::model::Model;
use super::trials::{Class, Rules, Trials};

/// A priority must suffer for so long, and miss less than this part of what it missed before.
const RULES: Rules = Rules { after: 2.0, better: 0.85 };

/// Nobody has less than this part of the GPU: who is seldom asked is to answer fast.
const LEAST: f64 = 0.4;

/// Halvings in a search of a part.
const HALVINGS: u32 = 8;

/// One of the models that leave SMs to each other.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Peer {
    /// Its cap, unless it may have all of the GPU,
    cap: Option<Sms>,
    /// and the demand that it is for, in requests a second.
    rate: f64,
}

/// Who of a GPU's models has such a cap.
#[derive(Debug, Clone)]
pub(super) struct Proportion {
    trials: Trials,
    /// The priority of these,
    sake: Option<u32>,
    /// by model.
    peers: BTreeMap<usize, Peer>,
}

impl Proportion {
    pub(super) fn new() -> Self {
        Self { trials: Trials::new(RULES), sake: None, peers: BTreeMap::new() }
    }

    /// What trials found out, without the caps: whose places may be others.
    pub(super) fn findings(&self) -> Self {
        Self { trials: self.trials.clone(), ..Self::new() }
    }

    /// The cap of a model that leaves SMs to others of its priority.
    pub(super) fn cap(&self, model: usize) -> Option<Sms> {
        self.peers.get(&model).and_then(|peer| peer.cap)
    }

    /// Whether it is still open whether it helps.
    pub(super) fn is_tried(&self) -> bool {
        self.trials.is_tried()
    }

    /// Learns from an interval of so many seconds, in which nobody's share changed if that is `settled`; of each priority alone, the highest
    /// first.
    pub(super) fn observe(&mut self, classes: &[Class], span_s: f64, settled: bool) {
        self.trials.observe(classes, span_s, settled);
    }

    /// Gives caps to those for whose sake that is done, or takes them back.
    pub(super) fn share_out(&mut self, here: &[usize], models: &[Model], terms: &[Terms], gpu: Sms) {
        let is_another = |(&model, peer): (&usize, &Peer)| {
            let demand = &models[model].demand;
            demand.is_bursty() || demand.is_another_than(peer.rate)
        };
        if self.peers.iter().any(is_another) {
            self.trials.put_off();
        }
        let sake = self.trials.sake();
        if std::mem::replace(&mut self.sake, sake) != sake {
            let peers = here.iter().copied().filter(|&model| {
                let asked = models[model].demand.rate() > 0.0;
                Some(terms[model].priority) == sake && asked && !models[model].hopeless(&terms[model])
            });
            self.peers = beside_each_other(&peers.collect::<Vec<_>>(), models, terms, gpu);
        }
        self.peers.retain(|&model, _| !models[model].was_pressed());
    }
}

/// Caps for those who need less than the one who needs most; nothing while one of them is not known.
fn beside_each_other(peers: &[usize], models: &[Model], terms: &[Terms], gpu: Sms) -> BTreeMap<usize, Peer> {
    let Some(needs) = needs(peers, models, gpu) else { return BTreeMap::new() };
    let most = needs.iter().copied().max().unwrap_or(gpu);
    let peer = |(&model, need): (&usize, Sms)| {
        let Terms { min, initial, initial_given, .. } = terms[model];
        let mean = f64::from(gpu.0) * (f64::from(need.0) / f64::from(most.0.max(1))).sqrt().max(LEAST);
        let chosen = if initial_given { initial } else { min };
        let sms = Sms((mean.ceil() as u32).next_multiple_of(Sms::STEP)).max(chosen);
        (model, Peer { cap: (sms < gpu).then_some(sms), rate: models[model].demand.rate() })
    };
    peers.iter().zip(needs).map(peer).collect()
}

/// The smallest shares that carry the demands, or the largest part of all demands whose shares fit onto the GPU.
fn needs(peers: &[usize], models: &[Model], gpu: Sms) -> Option<Vec<Sms>> {
    let of_part = |part: f64| -> Option<Vec<Sms>> {
        peers.iter().map(|&model| models[model].share_for(part * models[model].demand.peak())).collect()
    };
    let fit = |needs: &[Sms]| needs.iter().map(|sms| u64::from(sms.0)).sum::<u64>() <= u64::from(gpu.0);
    let all = of_part(1.0)?;
    if fit(&all) {
        return Some(all);
    }
    let (mut fits, mut beyond, mut needs) = (0.0, 1.0, of_part(0.0)?);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(fits, beyond);
        let of_middle = of_part(middle)?;
        if fit(&of_middle) {
            (fits, needs) = (middle, of_middle);
        } else {
            beyond = middle;
        }
    }
    Some(needs)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::fixtures::{in_one_burst, live, profile, terms};
    use super::super::super::{Live, Seen};
    use super::super::tally::Tally;
    use super::*;

    const GPU: Sms = Sms(132);
    const SPAN_S: f64 = 0.5;

    /// Models of 2 ms and 70 ms·SM a row, up to 66 SMs, with an SLO of 50 ms.
    fn known(count: usize) -> Vec<Terms> {
        vec![Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) }; count]
    }

    /// So many requests in half a second.
    fn came(arrived: u64) -> Live {
        let seen = Seen { span: Duration::from_millis(500), arrived, ..Seen::default() };
        Live { seen, ..live(GPU) }
    }

    struct There {
        terms: Vec<Terms>,
        models: Vec<Model>,
        proportion: Proportion,
    }

    impl There {
        /// Models to which so many requests have come in each half of a second for a while.
        fn new(terms: Vec<Terms>, arrived: &[u64]) -> Self {
            let models = terms.iter().map(|terms| Model::new(terms, GPU)).collect();
            let mut new = Self { terms, models, proportion: Proportion::new() };
            (0..12).for_each(|_| new.come(arrived));
            new
        }

        fn come(&mut self, arrived: &[u64]) {
            for ((model, terms), &arrived) in self.models.iter_mut().zip(&self.terms).zip(arrived) {
                model.observe(terms, &came(arrived), None);
            }
        }

        /// So many intervals in which so many of a hundred requests missed their SLOs, of which five may, and who has caps then.
        fn after(&mut self, missed: f64, intervals: u32) -> Vec<Option<u32>> {
            let (seen, allowed) = (Tally { arrived: 100.0, missed }, 5.0);
            let class = Class {
                priority: 1,
                seconds: 0.5,
                load: 0.6,
                seen,
                allowed,
                can_be_helped: true,
                ..Class::default()
            };
            let here: Vec<usize> = (0..self.terms.len()).collect();
            for _ in 0..intervals {
                self.proportion.observe(&[class], SPAN_S, true);
                self.proportion.share_out(&here, &self.models, &self.terms, GPU);
            }
            here.into_iter().map(|model| self.proportion.cap(model).map(|sms| sms.0)).collect()
        }
    }

    #[test]
    fn who_needs_less_leaves_sms_to_who_needs_more_while_they_miss() {
        // A row of sixteen takes 70 ms·SM and a bit: 900 a second need most of the 66 SMs that are of use, 200 a third of that.
        let mut there = There::new(known(3), &[450, 100, 5]);
        assert_eq!(there.after(0.0, 9), [None; 3]);
        assert_eq!(there.after(10.0, 1), [None; 3], "once is nothing");
        let caps = there.after(10.0, 1);
        assert_eq!((caps[0], caps[2]), (None, Some(54)), "two fifths of the GPU are left to everybody");
        let cap = f64::from(caps[1].unwrap());
        let need = |rate: f64| f64::from(there.models[0].share_for(rate).unwrap().0);
        let mean = 132.0 * (need(200.0) / need(900.0)).sqrt();
        assert!((cap - mean).abs() <= 2.0 && cap > 54.0, "{cap} for {mean}");
        assert_eq!(there.after(4.0, 5_000), caps, "it helps");
    }

    #[test]
    fn caps_that_do_not_help_are_taken_back() {
        let mut there = There::new(known(2), &[450, 5]);
        assert!(!there.proportion.is_tried());
        assert_eq!(there.after(10.0, 2), [None, Some(54)]);
        assert_eq!(there.after(9.0, 7), [None, Some(54)]);
        assert!(there.proportion.is_tried());
        assert_eq!(there.after(9.0, 1), [None; 2], "they should miss 8.5 at most");
        assert!(!there.proportion.is_tried());
        assert_eq!(there.after(10.0, 5_000), [None; 2], "nor are they tried again while nothing changes");
    }

    #[test]
    fn another_demand_ends_them_for_a_while() {
        for other in [[450, 150], [450, 50], [800, 100], [200, 100]] {
            let mut there = There::new(known(2), &[450, 100]);
            assert_ne!(there.after(10.0, 2), [None; 2]);
            (0..4).for_each(|_| there.come(&[460, 105]));
            assert_ne!(there.after(4.0, 9), [None; 2], "about the same");
            (0..8).for_each(|_| there.come(&other));
            assert_eq!(there.after(4.0, 1), [None; 2], "{other:?}");
            assert_eq!(there.after(10.0, 480), [None; 2]);
            let again = (1..20).find(|_| there.after(10.0, 1) != [None; 2]);
            assert_eq!(again, Some(9), "four minutes later, {other:?}");
        }
    }

    #[test]
    fn bursts_end_them_though_as_many_come() {
        let mut there = There::new(known(2), &[450, 100]);
        assert_ne!(there.after(10.0, 2), [None; 2]);
        for _ in 0..30 {
            for (model, live) in there.models.iter_mut().zip([came(450), in_one_burst(came(100))]) {
                model.observe(&there.terms[0], &live, None);
            }
        }
        assert_eq!(there.after(4.0, 1), [None; 2]);
    }

    #[test]
    fn who_turns_out_to_need_more_has_no_cap() {
        let mut there = There::new(known(3), &[450, 100, 5]);
        let caps = there.after(10.0, 2);
        there.models[1].press();
        assert_eq!(there.after(4.0, 1), [None, None, caps[2]]);
    }

    #[test]
    fn demands_that_do_not_fit_have_their_part() {
        let mut there = There::new(known(3), &[5_000, 1_000, 100]);
        let fits: u32 = needs(&[0, 1, 2], &there.models, GPU).unwrap().iter().map(|sms| sms.0).sum();
        assert!(fits <= 132 && fits > 100, "{fits}");
        let caps = there.after(10.0, 2);
        assert!(caps[0].is_none() && caps[1] > caps[2] && caps[2] >= Some(54), "{caps:?}");
    }

    #[test]
    fn others_have_none() {
        let one = &known(1)[0];
        let chosen = Terms { initial: Sms(100), initial_given: true, ..one.clone() };
        let lower = Terms { priority: 2, ..one.clone() };
        let hopeless = Terms { slo: Duration::from_millis(1), ..one.clone() };
        let models = vec![one.clone(), one.clone(), chosen, lower, hopeless, one.clone()];
        let mut there = There::new(models, &[450, 5, 5, 5, 5, 0]);
        let caps = there.after(10.0, 2);
        assert_eq!(caps, [None, Some(54), Some(100), None, None, None], "nobody has less than was chosen");
        let mut there = There::new(vec![one.clone(), one.clone(), terms("b", 50)], &[450, 5, 5]);
        assert_eq!(there.after(10.0, 2), [None; 3], "nobody knows what the last one needs");
    }
}
