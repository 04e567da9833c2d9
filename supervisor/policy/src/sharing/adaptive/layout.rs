//! Layouts: which part of a GPU's SMs each of its models may use, and which of them are worth a try.
//!
//! What costs is how many batches meet on the same SMs, not how many SMs a model has. So the family
//! is small: it says how many models meet, and within it the models' work says which ones.

use std::fmt;

use shadowslice_shared::contention::Gpu;
use shadowslice_shared::groups::{Groups, Part};
use shadowslice_shared::units::Sms;

use super::super::Terms;

/// A model that causes less than this part of the GPU's work meets nobody often enough to matter.
const MATTERS: f64 = 0.02;

/// The most layouts that one trial compares: more would take longer than a load often lasts.
pub(super) const MAX_CANDIDATES: usize = 8;

/// How a layout divides a GPU. A model that no part is said of may use all SMs that it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Every model has the share that it starts with: the whole GPU unless the configuration says
    /// otherwise.
    AtRest,
    /// Every model has all SMs that it may have, as under plain MPS.
    Everything,
    /// Priorities below the first in two halves, the first everywhere.
    LowerHalves,
    /// Priorities below the first all in one half.
    LowerHalf,
    /// Priorities below the first all in one quarter.
    LowerQuarter,
    /// Priorities below the first in three thirds.
    LowerThirds,
    /// The lowest priority in one half.
    LowestHalf,
    /// All models in two halves with about the same work.
    Halves,
    /// All models in two halves: the tighter latency objectives in one, the looser in the other.
    HalvesByObjective,
    /// All models in three thirds.
    Thirds,
    /// A part for each model, by its work.
    OwnParts,
}

impl Pattern {
    const fn name(self) -> &'static str {
        match self {
            Self::AtRest => "at-rest",
            Self::Everything => "everything",
            Self::LowerHalves => "lower-halves",
            Self::LowerHalf => "lower-half",
            Self::LowerQuarter => "lower-quarter",
            Self::LowerThirds => "lower-thirds",
            Self::LowestHalf => "lowest-half",
            Self::Halves => "halves",
            Self::HalvesByObjective => "halves-by-objective",
            Self::Thirds => "thirds",
            Self::OwnParts => "own-parts",
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The SMs that a model should have, and which ones where its share is a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) sms: Sms,
    pub(super) groups: Option<Groups>,
}

impl Placement {
    pub(super) fn at_rest(terms: &Terms, shape: &Gpu) -> Self {
        let sms = terms.within(if terms.initial_given { terms.initial } else { shape.sms });
        Self { sms, groups: None }
    }
}

/// A layout of one GPU. Models are indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) pattern: Pattern,
    parts: Vec<(usize, Part)>,
}

/// What decides where a model goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tenant {
    pub(super) model: usize,
    pub(super) priority: u32,
    /// The latency objective in seconds.
    pub(super) slo_s: f64,
    /// The part of the GPU's time that the model's batches took of late, 0 to 1.
    pub(super) work: f64,
}

impl Layout {
    pub(super) const AT_REST: Self = Self { pattern: Pattern::AtRest, parts: Vec::new() };
    pub(super) const EVERYTHING: Self = Self { pattern: Pattern::Everything, parts: Vec::new() };

    fn new(pattern: Pattern, parts: Vec<(usize, Part)>) -> Self {
        Self { pattern, parts }
    }

    pub(super) fn part_of(&self, model: usize) -> Part {
        self.parts.iter().find(|(of, _)| *of == model).map_or(Part::WHOLE, |(_, part)| *part)
    }

    /// Returns what a model has under this layout. `inside`: its share is a partition inside the
    /// worker.
    pub(super) fn placement(&self, model: usize, terms: &Terms, shape: &Gpu, inside: bool) -> Placement {
        let part = self.part_of(model);
        if self.pattern == Pattern::AtRest {
            return Placement::at_rest(terms, shape);
        }
        match &shape.division {
            _ if part == Part::WHOLE => Placement { sms: terms.most(), groups: None },
            Some(division) if inside => {
                let groups = division.groups_in(part);
                let sms = division.sms(Groups::first(groups.count()));
                Placement { sms: terms.within(sms), groups: Some(groups) }
            }
            _ => {
                let sms = (f64::from(shape.sms.0) * part.fraction()).round();
                Placement { sms: terms.within(Sms(sms as u32)), groups: None }
            }
        }
    }

    /// Whether the first priority may not use the whole GPU.
    pub(super) fn confines_first(&self) -> bool {
        matches!(
            self.pattern,
            Pattern::Halves | Pattern::HalvesByObjective | Pattern::Thirds | Pattern::OwnParts
        )
    }

    /// Whether each model has the same part in both.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let sorted = |layout: &Self| {
            let mut parts = layout.parts.clone();
            parts.sort_unstable();
            parts
        };
        (self.pattern == Pattern::AtRest) == (other.pattern == Pattern::AtRest)
            && sorted(self) == sorted(other)
    }

    /// Returns the same layout for models with other indices.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize>) -> Self {
        let parts = self.parts.iter().filter_map(|&(model, part)| Some((now(model)?, part)));
        Self { pattern: self.pattern, parts: parts.collect() }
    }
}

/// Returns the layouts that are worth a try for a model that violates its objective, gentle ones
/// first; the one in which every model is everywhere is not among them. The first priority is
/// confined only for its own sake.
pub(super) fn candidates(tenants: &[Tenant], beneficiary: u32) -> Vec<Layout> {
    let active: Vec<Tenant> = tenants.iter().copied().filter(|tenant| tenant.work >= MATTERS).collect();
    let first = active.iter().map(|tenant| tenant.priority).min();
    let last = active.iter().map(|tenant| tenant.priority).max();
    let below = |priority: Option<u32>| -> Vec<Tenant> {
        tenants.iter().copied().filter(|tenant| Some(tenant.priority) > priority).collect()
    };
    let lower = below(first);
    let lower_active = active.iter().filter(|tenant| Some(tenant.priority) > first).count();
    let lowest: Vec<Tenant> =
        tenants.iter().copied().filter(|tenant| Some(tenant.priority) >= last).collect();
    let three_priorities =
        active.iter().any(|tenant| Some(tenant.priority) > first && Some(tenant.priority) < last);
    let mut found = Vec::new();
    let mut add = |when: bool, pattern: Pattern, parts: Vec<(usize, Part)>| {
        if when && !parts.is_empty() {
            found.push(Layout::new(pattern, parts));
        }
    };
    add(lower_active >= 2, Pattern::LowerHalves, balanced(&lower, 2));
    add(active.len() >= 3, Pattern::Halves, balanced(tenants, 2));
    add(lower_active >= 1, Pattern::LowerHalf, together(&lower, 2));
    add(active.len() >= 2, Pattern::HalvesByObjective, by_objective(tenants));
    add(lower_active >= 3, Pattern::LowerThirds, balanced(&lower, 3));
    add(active.len() >= 4, Pattern::Thirds, balanced(tenants, 3));
    add(lower_active >= 1, Pattern::LowerQuarter, together(&lower, 4));
    add(three_priorities, Pattern::LowestHalf, together(&lowest, 2));
    add((2..=4).contains(&active.len()), Pattern::OwnParts, own_parts(&active));
    let for_first = first.is_some_and(|first| beneficiary <= first);
    let mut different: Vec<Layout> = Vec::new();
    for layout in found.into_iter().filter(|layout| for_first || !layout.confines_first()) {
        if !different.iter().any(|other| other.is_same(&layout)) {
            different.push(layout);
        }
    }
    different.truncate(MAX_CANDIDATES);
    different
}

/// All in the last of so many equal pieces.
fn together(tenants: &[Tenant], of: u8) -> Vec<(usize, Part)> {
    tenants.iter().map(|tenant| (tenant.model, Part::new(of - 1, 1, of))).collect()
}

/// Distributes models over so many equal pieces: the largest first, each where there is least.
fn balanced(tenants: &[Tenant], of: u8) -> Vec<(usize, Part)> {
    let mut loads = vec![0.0_f64; usize::from(of)];
    let place = |tenant: &Tenant| {
        let least =
            (0..of).min_by(|&one, &other| loads[usize::from(one)].total_cmp(&loads[usize::from(other)]));
        let piece = least.unwrap_or(0);
        // Models without work must not all go to the same piece.
        loads[usize::from(piece)] += tenant.work.max(MATTERS / 10.0);
        (tenant.model, Part::new(piece, 1, of))
    };
    by_work(tenants).iter().map(place).collect()
}

/// The tightest objectives go into the first half, up to half of the work.
fn by_objective(tenants: &[Tenant]) -> Vec<(usize, Part)> {
    let mut order = tenants.to_vec();
    order.sort_by(|one, other| one.slo_s.total_cmp(&other.slo_s).then(one.model.cmp(&other.model)));
    let all: f64 = order.iter().map(|tenant| tenant.work).sum();
    let mut before = 0.0;
    let place = |tenant: &Tenant| {
        let middle = before + tenant.work / 2.0;
        before += tenant.work;
        (tenant.model, Part::new(u8::from(middle > all / 2.0), 1, 2))
    };
    order.iter().map(place).collect()
}

/// The parts that a GPU can be divided into for two, three and four models, the largest first.
const DIVISIONS: [&[Part]; 6] = [
    &[Part::new(0, 1, 2), Part::new(1, 1, 2)],
    &[Part::new(0, 2, 3), Part::new(2, 1, 3)],
    &[Part::new(0, 3, 4), Part::new(3, 1, 4)],
    &[Part::new(0, 1, 3), Part::new(1, 1, 3), Part::new(2, 1, 3)],
    &[Part::new(0, 1, 2), Part::new(2, 1, 4), Part::new(3, 1, 4)],
    &[Part::new(0, 1, 4), Part::new(1, 1, 4), Part::new(2, 1, 4), Part::new(3, 1, 4)],
];

/// The division in which the model with the most work for its part has the least.
fn own_parts(active: &[Tenant]) -> Vec<(usize, Part)> {
    let order = by_work(active);
    let most = |parts: &&&[Part]| {
        let loads = order.iter().zip(parts.iter()).map(|(tenant, part)| tenant.work / part.fraction());
        loads.fold(0.0, f64::max)
    };
    let able = DIVISIONS.iter().filter(|parts| parts.len() == order.len());
    let best = able.min_by(|one, other| most(one).total_cmp(&most(other)));
    let parts = best.copied().unwrap_or_default();
    order.iter().zip(parts).map(|(tenant, part)| (tenant.model, *part)).collect()
}

fn by_work(tenants: &[Tenant]) -> Vec<Tenant> {
    let mut order = tenants.to_vec();
    order.sort_by(|one, other| other.work.total_cmp(&one.work).then(one.model.cmp(&other.model)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(model: usize, priority: u32, slo_ms: u32, work: f64) -> Tenant {
        Tenant { model, priority, slo_s: f64::from(slo_ms) / 1e3, work }
    }

    fn patterns(tenants: &[Tenant]) -> Vec<Pattern> {
        candidates(tenants, 1).iter().map(|layout| layout.pattern).collect()
    }

    fn found(tenants: &[Tenant], pattern: Pattern) -> Layout {
        candidates(tenants, 1).into_iter().find(|layout| layout.pattern == pattern).unwrap()
    }

    #[test]
    fn a_model_alone_or_beside_idle_ones_has_nothing_to_try() {
        assert_eq!(candidates(&[], 1), []);
        assert_eq!(candidates(&[tenant(0, 1, 10, 0.9)], 1), []);
        assert_eq!(candidates(&[tenant(0, 1, 10, 0.9), tenant(1, 1, 10, 0.0)], 1), []);
    }

    #[test]
    fn beside_a_hog_of_a_lower_priority_it_is_the_hog_that_gets_less() {
        let two = [tenant(0, 1, 5, 0.2), tenant(1, 3, 100, 0.9)];
        use Pattern::{HalvesByObjective, LowerHalf, LowerQuarter, OwnParts};
        assert_eq!(patterns(&two), [LowerHalf, HalvesByObjective, LowerQuarter, OwnParts]);
        let half = found(&two, Pattern::LowerHalf);
        assert_eq!((half.part_of(0), half.part_of(1)), (Part::WHOLE, Part::new(1, 1, 2)));
    }

    #[test]
    fn the_first_priority_is_everywhere_while_the_others_share_two_halves_by_work() {
        let five = [
            tenant(0, 1, 25, 0.5),
            tenant(1, 1, 15, 0.3),
            tenant(2, 2, 40, 0.6),
            tenant(3, 2, 15, 0.4),
            tenant(4, 3, 60, 0.3),
        ];
        let layout = &candidates(&five, 1)[0];
        assert_eq!(layout.pattern, Pattern::LowerHalves);
        assert_eq!([0, 1].map(|model| layout.part_of(model)), [Part::WHOLE; 2]);
        assert_ne!(layout.part_of(2), layout.part_of(3));
        assert_eq!(layout.part_of(3), layout.part_of(4), "0.4 and 0.3 beside 0.6");
        assert!(candidates(&five, 1).len() <= MAX_CANDIDATES);
    }

    #[test]
    fn the_first_priority_is_not_confined_for_a_lower_one() {
        let three = [tenant(0, 1, 5, 0.4), tenant(1, 2, 10, 0.4), tenant(2, 2, 20, 0.4)];
        let confines = |beneficiary| candidates(&three, beneficiary).iter().any(Layout::confines_first);
        assert!(confines(1) && !confines(2));
    }

    #[test]
    fn an_own_part_is_as_large_as_its_work() {
        let two = [tenant(0, 1, 10, 0.2), tenant(1, 1, 10, 0.7)];
        let own = found(&two, Pattern::OwnParts);
        assert_eq!((own.part_of(1), own.part_of(0)), (Part::new(0, 3, 4), Part::new(3, 1, 4)));
        let three = [tenant(0, 1, 10, 0.8), tenant(1, 1, 10, 0.3), tenant(2, 1, 10, 0.3)];
        assert_eq!(found(&three, Pattern::OwnParts).part_of(0), Part::new(0, 1, 2));
    }

    #[test]
    fn tight_objectives_are_kept_apart_from_loose_ones() {
        let four = [tenant(0, 1, 50, 0.3), tenant(1, 1, 5, 0.3), tenant(2, 1, 60, 0.3), tenant(3, 1, 6, 0.3)];
        let layout = found(&four, Pattern::HalvesByObjective);
        let (tight, loose) = (Part::new(0, 1, 2), Part::new(1, 1, 2));
        assert_eq!([0, 1, 2, 3].map(|model| layout.part_of(model)), [loose, tight, loose, tight]);
    }
}
