//! The policies behind one interface.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use super::adaptive::Adaptive;
use super::baselines::{Fixed, Gpulet, Gslice};
use super::carry_out::{Target, towards};
use super::feedback::Feedback;
use super::{Decision, Door, Facts, Relief, Terms};

/// How often doors follow what has come since the last decision, where that is longer ago: a load that comes at once is there within less.
pub const DOORS_EVERY: Duration = Duration::from_millis(100);

/// Which policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Ours.
    Adaptive,
    /// Nothing until a model misses, then the least that helps.
    Feedback,
    /// Every model may use the whole GPU.
    Unpartitioned,
    /// As configured.
    Static,
    /// The GPU divided by the number of its models.
    Equal,
    /// Twice that, as NVIDIA advises.
    Half,
    /// GSLICE's self-tuning.
    Gslice,
    /// gpulet's epochs.
    Gpulet,
}

impl Kind {
    /// All of them, the one that is judged first.
    pub const ALL: [Self; 8] = [
        Self::Adaptive,
        Self::Feedback,
        Self::Unpartitioned,
        Self::Static,
        Self::Equal,
        Self::Half,
        Self::Gslice,
        Self::Gpulet,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Feedback => "feedback",
            Self::Unpartitioned => "unpartitioned",
            Self::Static => "static",
            Self::Equal => "equal",
            Self::Half => "half",
            Self::Gslice => "gslice",
            Self::Gpulet => "gpulet",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a word names no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a policy; give adaptive, feedback, unpartitioned, static, equal, half, gslice or gpulet"
)]
pub struct UnknownPolicy(pub String);

impl FromStr for Kind {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == word);
        found.ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// A policy and what it remembers.
#[derive(Debug, Clone)]
pub struct Policy {
    kind: Kind,
    gpus: Vec<Sms>,
    terms: Vec<Terms>,
    rule: Rule,
    /// What decides batching and admission in its place.
    our_doors: Option<Adaptive>,
}

#[derive(Debug, Clone)]
enum Rule {
    Adaptive(Adaptive),
    Feedback(Feedback),
    Fixed(Fixed),
    Gslice(Gslice),
    Gpulet(Gpulet),
}

impl Policy {
    /// A policy of this kind for these models on these GPUs.
    ///
    /// # Panics
    ///
    /// If a model's GPU is not among `gpus`.
    pub fn new(kind: Kind, gpus: &[Sms], terms: &[Terms]) -> Self {
        assert!(terms.iter().all(|terms| terms.gpu < gpus.len()), "every model's GPU must exist");
        let rule = match kind {
            Kind::Unpartitioned => Rule::Fixed(Fixed::unpartitioned(gpus, terms)),
            Kind::Adaptive => Rule::Adaptive(Adaptive::new(gpus, terms)),
            Kind::Feedback => Rule::Feedback(Feedback::new(gpus, terms)),
            Kind::Static => Rule::Fixed(Fixed::as_configured(terms)),
            Kind::Equal => Rule::Fixed(Fixed::equal(gpus, terms)),
            Kind::Half => Rule::Fixed(Fixed::half(gpus, terms)),
            Kind::Gslice => Rule::Gslice(Gslice::new(terms)),
            Kind::Gpulet => Rule::Gpulet(Gpulet::new(terms)),
        };
        Self { kind, terms: terms.to_vec(), rule, our_doors: None, gpus: gpus.to_vec() }
    }

    /// The same policy for the shares, with our batching and admission in place of its own.
    #[must_use]
    pub(super) fn with_our_doors(mut self) -> Self {
        self.our_doors = Some(Adaptive::new(&self.gpus, &self.terms));
        self
    }

    /// Goes on from what an earlier policy has learnt of the models that are the same here, on as large a GPU, of which each has that place
    /// there. Baselines' own rules begin anew.
    ///
    /// # Panics
    ///
    /// If the earlier one is for fewer GPUs.
    #[must_use]
    pub fn remembering(mut self, earlier: &Self, places: &[Option<usize>]) -> Self {
        let is_same = |terms: &Terms, place: &usize| {
            let as_large = earlier.gpus.get(terms.gpu) == self.gpus.get(terms.gpu);
            as_large && earlier.terms.get(*place) == Some(terms)
        };
        let same: Vec<Option<usize>> = self
            .terms
            .iter()
            .zip(places)
            .map(|(terms, place)| place.filter(|at| is_same(terms, at)))
            .collect();
        let remember = |ours: &mut Adaptive, theirs: &Adaptive| {
            ours.remember(theirs, &earlier.terms, &self.terms, &same, &self.gpus);
        };
        if let (Rule::Adaptive(ours), Rule::Adaptive(theirs)) = (&mut self.rule, &earlier.rule) {
            remember(ours, theirs);
        }
        if let (Some(ours), Some(theirs)) = (&mut self.our_doors, &earlier.our_doors) {
            remember(ours, theirs);
        }
        self
    }

    /// Which policy it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The shares to start the models' first workers with, in the models' order.
    pub fn initial(&self) -> Vec<Sms> {
        let wanted: Vec<Sms> = match &self.rule {
            Rule::Fixed(fixed) => fixed.shares().to_vec(),
            Rule::Adaptive(adaptive) => adaptive.levels().to_vec(),
            Rule::Feedback(feedback) => feedback.caps(),
            Rule::Gslice(_) | Rule::Gpulet(_) => self.terms.iter().map(|terms| terms.initial).collect(),
        };
        wanted.iter().zip(&self.terms).map(|(&sms, terms)| terms.within(sms)).collect()
    }

    /// How each model batches and whom it lets in with these shares, in the models' order, by what is known already: profiles, and what
    /// was learnt before. For models of which nothing has been seen yet.
    ///
    /// # Panics
    ///
    /// If there are fewer shares than models.
    pub fn first_doors(&self, shares: &[Sms]) -> Vec<Door> {
        match (&self.rule, &self.our_doors) {
            (Rule::Adaptive(adaptive), _) => {
                adaptive.watched(adaptive.first_doors(&self.terms, &self.gpus, shares), shares)
            }
            (_, Some(ours)) => ours.first_doors(&self.terms, &self.gpus, shares),
            (_, None) => self.terms.iter().map(|terms| Door::open(terms.max_batch.max(1))).collect(),
        }
    }

    /// What should change, and why. To be asked once an interval.
    pub fn decide(&mut self, facts: &Facts) -> Decision {
        let mut targets: Vec<Target> = match &mut self.rule {
            Rule::Adaptive(adaptive) => return adaptive.decide(&self.terms, facts),
            Rule::Feedback(feedback) => return feedback.decide(&self.terms, facts),
            Rule::Fixed(fixed) => fixed.decide(&self.terms),
            Rule::Gslice(gslice) => gslice.decide(&self.terms, facts),
            Rule::Gpulet(gpulet) => gpulet.decide(&self.terms, facts),
        };
        if let Some(ours) = &mut self.our_doors {
            ours.observe(&self.terms, facts);
            let shares = facts.shares();
            let doors = ours.doors(&self.terms, facts, &shares);
            targets.iter_mut().zip(doors).for_each(|(target, door)| target.door = door);
        }
        towards(&targets, &self.terms, facts)
    }

    /// Doors between two decisions, by what has come since the last one; none where the policy has none of its own. To be asked every
    /// [`DOORS_EVERY`]. Only how much doors let in is remembered.
    pub fn doors_meanwhile(&mut self, facts: &Facts) -> Vec<Door> {
        match (&mut self.rule, &mut self.our_doors) {
            (Rule::Adaptive(adaptive), _) => {
                let shares = facts.least_shares();
                let doors = adaptive.doors_meanwhile(&self.terms, facts, &shares);
                adaptive.watched(doors, &shares)
            }
            (_, Some(ours)) => ours.doors_meanwhile(&self.terms, facts, &facts.shares()),
            (_, None) => Vec::new(),
        }
    }

    /// What `model` should have at once, or as soon as can be, which shows a sign of pressure since `onset`; nothing if
    /// another share would not help.
    pub fn pressure(&mut self, model: usize, onset: Moment, facts: &Facts) -> Option<Relief> {
        match &mut self.rule {
            Rule::Adaptive(adaptive) => adaptive.pressure(model, onset, &self.terms, facts),
            Rule::Feedback(_) | Rule::Fixed(_) | Rule::Gslice(_) | Rule::Gpulet(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Verdict;
    use super::super::fixtures::{live, profile, terms};
    use super::super::{Executed, Live, Seen};
    use super::*;

    const GPU: Sms = Sms(132);

    fn model(name: &str) -> Terms {
        Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms(name, 50) }
    }

    /// So many requests in the last half second of so many.
    fn facts(arrived: &[u64], intervals: u32) -> Facts {
        let span = Duration::from_millis(500);
        let model = |&arrived: &u64| {
            let executed = vec![Executed { rows: 4, count: arrived / 4, mean: Duration::from_millis(9) }];
            let (answered, in_time) = (arrived, arrived);
            Live { seen: Seen { span, arrived, answered, in_time, executed, ..Seen::default() }, ..live(GPU) }
        };
        let now = Moment::after_origin(span * intervals);
        Facts { now, gpus: vec![GPU], models: arrived.iter().map(model).collect() }
    }

    /// Whose shares change at once when a policy for these models, whose places in one that has watched `a` and `b` are these, sees
    /// one more interval.
    fn moved(names: &[&str], places: &[Option<usize>]) -> Vec<usize> {
        let [a, b] = ["a", "b"].map(model);
        let mut earlier = Policy::new(Kind::Adaptive, &[GPU], &[a, b]);
        for interval in 1..=20 {
            let _not_carried_out = earlier.decide(&facts(&[50, 50], interval));
        }
        let terms: Vec<Terms> = names.iter().map(|name| model(name)).collect();
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms).remembering(&earlier, places);
        let plan = policy.decide(&facts(&vec![50; names.len()], 21)).plan;
        plan.iter().flat_map(|plan| &plan.changes).map(|change| change.model).collect()
    }

    #[test]
    fn what_was_learnt_of_models_that_stay_is_remembered() {
        assert_eq!(moved(&["a", "b"], &[Some(0), Some(1)]), [0, 1]);
        assert_eq!(moved(&["new", "b", "a"], &[None, Some(1), Some(0)]), [1, 2]);
        assert_eq!(moved(&["b"], &[Some(1)]), [0]);
        assert_eq!(moved(&["a", "b"], &[None, None]), [], "others of the same names");
        assert_eq!(moved(&["a", "b"], &[Some(1), Some(7)]), [], "not the same, and none at all");
    }

    #[test]
    fn a_door_that_was_open_does_not_narrow_at_once_where_its_model_stays() {
        let terms = [model("a"), Terms { priority: 2, ..model("b") }];
        let mut earlier = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let open = earlier.decide(&facts(&[50, 50], 1)).doors[1].admit;
        let narrowed = |places: &[Option<usize>]| {
            let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms).remembering(&earlier, places);
            policy.decide(&facts(&[600, 600], 2)).doors[1].admit
        };
        assert_eq!((open, narrowed(&[Some(0), Some(1)])), (1.0, 1.0));
        assert!(narrowed(&[Some(0), None]) < 0.9);
    }

    #[test]
    fn what_was_learnt_on_another_gpu_is_not() {
        let on = |gpu: Sms| Policy::new(Kind::Adaptive, &[gpu], &[model("a")]);
        let mut earlier = on(GPU);
        for interval in 1..=20 {
            let _not_carried_out = earlier.decide(&facts(&[50], interval));
        }
        let first_doors = |gpu: Sms| on(gpu).remembering(&earlier, &[Some(0)]).first_doors(&[gpu]);
        assert_ne!(first_doors(GPU), on(GPU).first_doors(&[GPU]));
        assert_eq!(first_doors(Sms(60)), on(Sms(60)).first_doors(&[Sms(60)]));
    }

    #[test]
    fn what_was_found_out_about_a_gpu_is_remembered_while_its_models_stay() {
        let [a, b, c] = ["a", "b", "c"].map(|name| terms(name, 50));
        let mut earlier = Policy::new(Kind::Adaptive, &[GPU], &[a.clone(), b.clone(), c.clone()]);
        for interval in 1..=20 {
            let mut facts = facts(&[40; 3], interval);
            // Until caps that fit are tried, which help.
            facts.models.iter_mut().for_each(|live| live.seen.in_time = if interval < 6 { 24 } else { 40 });
            let _not_carried_out = earlier.decide(&facts);
        }
        let levels = |terms: &[Terms], places: &[Option<usize>]| {
            Policy::new(Kind::Adaptive, &[GPU], terms).remembering(&earlier, places).initial()
        };
        let [first, second, third] = [Some(0), Some(1), Some(2)];
        assert_eq!(
            levels(&[b.clone(), c.clone(), a.clone()], &[second, third, first]),
            [Sms(44); 3],
            "they fit"
        );
        assert_eq!(levels(&[a.clone(), b.clone(), c], &[first, second, None]), [GPU; 3]);
        assert_eq!(levels(&[a, b], &[first, second]), [GPU; 2]);
        for interval in 21..=260 {
            let _not_carried_out = earlier.decide(&facts(&[40; 3], interval));
        }
        assert_eq!(earlier.initial(), [GPU; 3], "nor are they kept for ever where no share comes to be so");
    }

    #[test]
    fn who_makes_room_goes_on() {
        let [a, b] = [model("a"), Terms { priority: 3, ..model("b") }];
        let mut earlier = Policy::new(Kind::Adaptive, &[GPU], &[a.clone(), b.clone()]);
        let suffers = |interval: u32| {
            let mut facts = facts(&[50, 50], interval);
            facts.models[0].seen.in_time = 40;
            facts.models[1].seen.busy = 0.9;
            facts
        };
        let not_carried_out = (1..=20).map(|interval| earlier.decide(&suffers(interval)).report);
        let reports: Vec<_> = not_carried_out.collect();
        assert_eq!(earlier.initial(), [GPU, Sms(66)]);
        assert!(matches!(reports[19][1], Verdict::Yield { from: GPU, .. }), "{:?}", reports[19]);
        let mut policy =
            Policy::new(Kind::Adaptive, &[GPU], &[b, a]).remembering(&earlier, &[Some(1), Some(0)]);
        assert_eq!(policy.initial(), [Sms(86), GPU]);
        let mut next = suffers(21);
        next.models.reverse();
        let plan = policy.decide(&next).plan;
        let moved: Vec<usize> =
            plan.iter().flat_map(|plan| &plan.changes).map(|change| change.model).collect();
        assert_eq!(moved, [0], "who is made room for keeps its share");
    }

    #[test]
    fn doors_go_by_profiles_until_something_is_seen() {
        let doors = |policy: Policy, shares: &[Sms]| policy.first_doors(shares);
        let terms = [model("a"), Terms { profile: None, ..model("unknown") }];
        let new = |kind| Policy::new(kind, &[GPU], &terms);
        let batches = |sms| {
            let doors = doors(new(Kind::Adaptive), &[Sms(sms); 2]);
            doors.iter().map(|door| door.max_batch).collect::<Vec<_>>()
        };
        // Four fifths of 50 ms for 2 ms and 70 ms·SM a row; at most 16 rows.
        assert_eq!([14, 26, 66].map(batches), [[7, 16], [14, 16], [16, 16]].map(Vec::from));
        let refuse =
            |policy| doors(policy, &[GPU, GPU]).iter().all(|door| door.refuse_late && door.admit == 1.0);
        assert!(refuse(new(Kind::Adaptive)) && refuse(new(Kind::Half).with_our_doors()));
        assert_eq!(doors(new(Kind::Half), &[GPU, GPU]), [Door::open(16); 2]);
    }

    #[test]
    fn every_policy_is_found_by_its_name() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("Adaptive".parse::<Kind>().is_err());
    }
}
