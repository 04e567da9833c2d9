//! What was seen on a GPU: of each priority, for [trials](super::trials) for its sake, and of all.

use shadowslice_shared::units::Sms;

use super::super::{Facts, Seen, Terms};
use super::model::Model;
use super::tally::Tally;
use super::trials::Class;

/// A priority asks for little that takes less than this part of the GPU, with those above it.
const LITTLE: f64 = 0.5;

/// Those who together execute for more than this part of the time are in others' way.
const BUSY: f64 = 0.5;

/// The models of a GPU with so many SMs, and what was seen of all.
#[derive(Debug, Clone, Copy)]
pub(super) struct There<'a> {
    pub(super) models: &'a [Model],
    pub(super) terms: &'a [Terms],
    pub(super) facts: &'a Facts,
    pub(super) here: &'a [usize],
    pub(super) sms: Sms,
}

impl<'a> There<'a> {
    /// How long the interval was, in seconds.
    pub(super) fn span_s(&self) -> f64 {
        self.each().map(|(seen, ..)| seen.span).max().unwrap_or_default().as_secs_f64()
    }

    /// What was seen of each model, its priority, and whether the whole GPU would carry it.
    pub(super) fn each(&self) -> impl Iterator<Item = (&'a Seen, u32, bool)> {
        let Self { models, terms, facts, .. } = *self;
        let each = move |&model: &usize| {
            (&facts.models[model].seen, terms[model].priority, models[model].could_be_carried())
        };
        self.here.iter().map(each)
    }

    /// How many times as long batches take as they should beside such neighbours, weighed by demand; nothing where a model
    /// has no profile that says so.
    pub(super) fn slowed(&self) -> Option<f64> {
        let models = || self.here.iter().map(|&model| &self.models[model]);
        let undisturbed: f64 = models().map(Model::load_undisturbed).sum();
        let seen: f64 = models().map(|model| model.load().unwrap_or(0.0)).sum();
        (models().all(Model::is_profiled) && undisturbed > 0.0).then(|| seen / undisturbed)
    }

    /// Each priority with those above it, the highest first. Lower ones can help it if it asks for little and they execute for much of the time.
    pub(super) fn with_those_above(&self) -> Vec<Class> {
        let class = |priority: u32| {
            let mut class = self.class(priority, |model| {
                // Who is asked for more than the whole GPU could answer misses SLOs whoever makes room.
                self.terms[model].priority <= priority && self.models[model].could_be_carried()
            });
            let members = self.here.iter().filter(|&&model| self.terms[model].priority <= priority);
            class.load = self.load(members);
            let (below, busy) = self.below(priority);
            class.below = below;
            class.can_be_helped = class.load < LITTLE && busy > BUSY;
            class
        };
        self.priorities().into_iter().map(class).collect()
    }

    /// Each priority alone, the highest first. Its models can help each other if they are several, of a demand that stays, and if enough
    /// come in one interval: a few are enough to begin a trial, and of few requests some miss by chance.
    pub(super) fn alone(&self) -> Vec<Class> {
        let class = |priority: u32| {
            let of = |model: usize| self.terms[model].priority == priority;
            let class = self.class(priority, |model| of(model) && !self.is_hopeless(model));
            let members = || self.here.iter().filter(|&&model| of(model));
            let asked = || members().filter(|&&model| self.models[model].demand.rate() > 0.0);
            let stays = |&model: &usize| {
                let demand = &self.models[model].demand;
                demand.is_steady() && !demand.is_bursty()
            };
            let several = asked().filter(|&&model| !self.is_hopeless(model)).count() > 1;
            let can_be_helped = class.tells() && several && asked().all(stays);
            Class { load: self.load(members()), can_be_helped, ..class }
        };
        self.priorities().into_iter().map(class).collect()
    }

    fn priorities(&self) -> Vec<u32> {
        let mut priorities: Vec<u32> = self.here.iter().map(|&model| self.terms[model].priority).collect();
        priorities.sort_unstable();
        priorities.dedup();
        priorities
    }

    /// What came to these, and what of it missed SLOs.
    fn class(&self, priority: u32, counts: impl Fn(usize) -> bool) -> Class {
        let mut class = Class { priority, seconds: self.span_s(), ..Class::default() };
        for &model in self.here.iter().filter(|&&model| counts(model)) {
            let seen = &self.facts.models[model].seen;
            class.seen += Tally::of(seen);
            class.allowed += seen.arrived as f64 * self.terms[model].may_miss();
        }
        class
    }

    /// What came to those below a priority, and for how much of the time they executed, all together.
    fn below(&self, priority: u32) -> (Tally, f64) {
        let (mut below, mut busy) = (Tally::default(), 0.0);
        for &model in self.here.iter().filter(|&&model| self.terms[model].priority > priority) {
            let seen = &self.facts.models[model].seen;
            below += Tally::of(seen);
            busy += seen.busy;
        }
        (below, busy)
    }

    /// The part of the GPU that the demand of these models takes at least.
    pub(super) fn load<'m>(&self, models: impl IntoIterator<Item = &'m usize>) -> f64 {
        let loads = models.into_iter().map(|&model| self.models[model].load_undisturbed());
        loads.sum::<f64>() / f64::from(self.sms.0.max(1))
    }

    fn is_hopeless(&self, model: usize) -> bool {
        self.models[model].hopeless(&self.terms[model])
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shadowslice_shared::units::Moment;

    use super::super::super::Live;
    use super::super::super::fixtures::{in_one_burst, live, profile, terms};
    use super::*;

    /// A model of this priority, of 2 ms and 70 ms·SM a row, with an SLO of 50 ms.
    fn of(priority: u32) -> Terms {
        Terms { priority, profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) }
    }

    /// Half a second in which so many requests came, of which a tenth missed the SLO, and that part of which the lane executed.
    fn came(arrived: u64, busy: f64) -> Live {
        let (span, in_time) = (Duration::from_millis(500), arrived - arrived / 10);
        let seen = Seen { span, arrived, answered: arrived, in_time, busy, ..Seen::default() };
        Live { seen, ..live(Sms(132)) }
    }

    /// What is seen of models of these priorities when so much has come for a while.
    fn seen(terms: &[Terms], intervals: &[Vec<Live>], look: impl Fn(There) -> Vec<Class>) -> Vec<Class> {
        let mut models: Vec<Model> = terms.iter().map(|terms| Model::new(terms, Sms(132))).collect();
        for interval in intervals {
            for ((model, terms), live) in models.iter_mut().zip(terms).zip(interval) {
                model.observe(terms, live, None);
            }
        }
        let facts =
            Facts { now: Moment::default(), gpus: vec![Sms(132)], models: intervals.last().unwrap().clone() };
        let here: Vec<usize> = (0..terms.len()).collect();
        look(There { models: &models, terms, facts: &facts, here: &here, sms: Sms(132) })
    }

    fn steady(lives: &[Live]) -> Vec<Vec<Live>> {
        vec![lives.to_vec(); 12]
    }

    #[test]
    fn a_priority_counts_with_those_above_it_and_lower_ones_help_it() {
        let terms = [of(1), of(2), of(3)];
        let look = |lives: &[Live]| seen(&terms, &steady(lives), |there| there.with_those_above());
        let classes = look(&[came(100, 0.2), came(50, 0.6), came(20, 0.4)]);
        assert_eq!(classes.iter().map(|class| class.seen.arrived).collect::<Vec<_>>(), [100.0, 150.0, 170.0]);
        assert_eq!(classes.iter().map(|class| class.seen.missed).collect::<Vec<_>>(), [10.0, 15.0, 17.0]);
        assert!((classes[1].allowed - 1.5).abs() < 1e-9 && classes.is_sorted_by(|a, b| a.load < b.load));
        assert_eq!(classes.iter().map(|class| class.can_be_helped).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(classes.iter().map(|class| class.below.arrived).collect::<Vec<_>>(), [70.0, 20.0, 0.0]);
        assert_eq!(classes.iter().map(|class| class.below.missed).collect::<Vec<_>>(), [7.0, 2.0, 0.0]);
        let in_the_way = |busy: f64| look(&[came(100, 0.2), came(50, busy), came(20, busy)])[0].can_be_helped;
        assert_eq!([0.25, 0.3].map(in_the_way), [false, true], "together");
        let busy = look(&[came(500, 0.9), came(50, 0.6), came(20, 0.4)]);
        assert!(busy[0].load > LITTLE && !busy[0].can_be_helped, "it asks for much");
        let beyond = look(&[came(5_000, 1.0), came(50, 0.6), came(20, 0.4)]);
        assert_eq!(beyond[0].seen.arrived, 0.0, "no GPU would carry that");
    }

    #[test]
    fn models_of_one_priority_help_each_other_if_they_are_several_and_their_demand_stays() {
        let helped = |terms: &[Terms], intervals: &[Vec<Live>]| {
            let classes = seen(terms, intervals, |there| there.alone());
            classes.iter().map(|class| class.can_be_helped).collect::<Vec<_>>()
        };
        let (two, lives) = ([of(1), of(1), of(2)], [came(100, 0.2), came(50, 0.6), came(20, 0.4)]);
        let classes = seen(&two, &steady(&lives), |there| there.alone());
        assert_eq!(classes.iter().map(|class| class.seen.arrived).collect::<Vec<_>>(), [150.0, 20.0]);
        assert_eq!(helped(&two, &steady(&lives)), [true, false]);
        assert_eq!(
            helped(&two, &steady(&[came(100, 0.2), came(0, 0.0), came(20, 0.4)])),
            [false, false],
            "idle"
        );
        assert_eq!(
            helped(&two, &steady(&[came(9, 0.2), came(10, 0.6), came(20, 0.4)])),
            [false, false],
            "few"
        );
        assert_eq!(helped(&two, &steady(&[came(10, 0.2), came(10, 0.6), came(20, 0.4)])), [true, false]);
        let hopeless = Terms { slo: Duration::from_millis(1), ..of(1) };
        let with_hopeless = [of(1), hopeless.clone(), of(2)];
        assert_eq!(helped(&with_hopeless, &steady(&lives)), [false, false]);
        assert_eq!(seen(&with_hopeless, &steady(&lives), |there| there.alone())[0].seen.arrived, 100.0);
        let bursts = steady(&lives.clone().map(in_one_burst));
        assert_eq!(helped(&two, &bursts), [false, false]);
        let changed = [steady(&lives), vec![vec![came(400, 0.9), came(50, 0.6), came(20, 0.4)]; 5]].concat();
        assert_eq!(helped(&two, &changed), [false, false]);
        let since = [changed, vec![vec![came(400, 0.9), came(50, 0.6), came(20, 0.4)]]].concat();
        assert_eq!(helped(&two, &since), [true, false], "three seconds later it is another that stays");
    }
}
