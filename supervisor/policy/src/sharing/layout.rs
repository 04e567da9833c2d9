//! A layout defines which part of a GPU's SMs each model is allowed to use. This module lists the
//! layouts that are worth a trial.
//!
//! Kernels of models on the same SMs take turns. The slowdown of a model therefore depends less on its
//! number of SMs than on the other batches on these SMs. The number of these batches and the length of
//! their kernels matter most. The module lists only a small number of layouts. A pattern defines which
//! models share SMs, and the models' work determines the part of each model.

use std::fmt;

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::groups::{GpuPart, Groups};
use shadowslice_shared::units::Sms;

use super::ModelSpec;

/// The minimum work of a model that layouts take into account, as a fraction of the GPU. A model with
/// less work rarely executes at the same time as other models.
const MATTERS: f64 = 0.02;

/// The maximum number of models for which all distributions over two halves are listed. For six models,
/// there are 31 distributions. If there are more models, they are distributed only by their work.
const MAX_SPLIT_MODELS: usize = 6;

/// The half of the GPU that models of lower priorities share.
const HALF: GpuPart = GpuPart::new(1, 1, 2);

/// The number of pieces in the finest division of a GPU that layouts use.
const EIGHTHS: u8 = 8;

/// The rule by which a layout divides a GPU. A model that the rule does not mention gets its largest
/// possible share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Every model has its initial share. By default, this is the whole GPU.
    AtRest,
    /// Every model has its largest possible share, as under plain MPS.
    Everything,
    /// Every model has its largest possible share, and long batches pause for batches that would be late.
    Pauses,
    /// The model that violates its SLO has exclusive use of this part of the GPU. The other models
    /// share the rest.
    Apart(GpuPart),
    /// The models with the highest priority have exclusive use of this part of the GPU. The other
    /// models share the rest.
    FirstApart(GpuPart),
    /// The models below the highest priority are distributed over two halves.
    LowerHalves,
    /// All models below the highest priority share one half.
    LowerHalf,
    /// All models are distributed over two halves with similar amounts of work.
    Halves,
    /// All models are distributed over three thirds with similar amounts of work.
    Thirds,
    /// Each model uses a part of the GPU that no other model uses. The size of the part depends on the
    /// model's work.
    OwnParts,
}

impl fmt::Display for Pattern {
    /// Writes a name without spaces, such as `lower-half` or `apart-0.25`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Apart(part) => return write!(f, "apart-{:.2}", part.fraction()),
            Self::FirstApart(part) => return write!(f, "first-apart-{:.2}", part.fraction()),
            Self::AtRest => "at-rest",
            Self::Everything => "everything",
            Self::Pauses => "pauses",
            Self::LowerHalves => "lower-halves",
            Self::LowerHalf => "lower-half",
            Self::Halves => "halves",
            Self::Thirds => "thirds",
            Self::OwnParts => "own-parts",
        };
        f.write_str(name)
    }
}

/// The share of a model under a layout: the number of SMs, and the groups if the share is a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutShare {
    /// The number of SMs.
    pub sms: Sms,
    /// The groups of the partition.
    pub groups: Option<Groups>,
}

impl LayoutShare {
    pub(super) fn at_rest(spec: &ModelSpec, shape: &SharedGpu) -> Self {
        let sms = spec.share_for(if spec.initial_given { spec.initial } else { shape.sms });
        Self { sms, groups: None }
    }
}

/// A layout of one GPU. It refers to models by their indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The rule by which the layout divides the GPU.
    pub pattern: Pattern,
    parts: Vec<(usize, GpuPart)>,
}

/// The properties of a model that determine its part in a layout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayoutTenant {
    /// The index of the model.
    pub model: usize,
    /// The priority of the model. 1 is the highest.
    pub priority: u32,
    /// The recent work of the model: the fraction of the GPU that its batches used, 0 to 1.
    pub work: f64,
}

impl Layout {
    /// The layout in which every model has its initial share.
    pub const AT_REST: Self = Self { pattern: Pattern::AtRest, parts: Vec::new() };
    pub(super) const EVERYTHING: Self = Self { pattern: Pattern::Everything, parts: Vec::new() };
    pub(super) const PAUSES: Self = Self { pattern: Pattern::Pauses, parts: Vec::new() };

    fn new(pattern: Pattern, parts: Vec<(usize, GpuPart)>) -> Self {
        Self { pattern, parts }
    }

    pub(super) fn part_of(&self, model: usize) -> GpuPart {
        self.parts.iter().find(|(of, _)| *of == model).map_or(GpuPart::WHOLE, |(_, part)| *part)
    }

    /// Returns the share of a model under this layout. `inside` is true if the share is a partition
    /// inside the worker.
    pub fn placement(&self, model: usize, spec: &ModelSpec, shape: &SharedGpu, inside: bool) -> LayoutShare {
        let part = self.part_of(model);
        if self.pattern == Pattern::AtRest {
            return LayoutShare::at_rest(spec, shape);
        }
        match &shape.division {
            _ if part == GpuPart::WHOLE => LayoutShare { sms: spec.max_share(), groups: None },
            Some(division) if inside => {
                let groups = division.groups_in(part);
                let sms = division.sms(Groups::first(groups.count()));
                LayoutShare { sms: spec.share_for(sms), groups: Some(groups) }
            }
            _ => {
                let sms = (f64::from(shape.sms.0) * part.fraction()).round();
                LayoutShare { sms: spec.share_for(Sms(sms as u32)), groups: None }
            }
        }
    }

    /// Returns true if this layout restricts the models with the highest priority to less than the
    /// whole GPU.
    pub(super) fn confines_first(&self) -> bool {
        use Pattern::{Apart, FirstApart, Halves, OwnParts, Thirds};
        matches!(self.pattern, Apart(_) | FirstApart(_) | Halves | Thirds | OwnParts)
    }

    /// Returns true if long batches pause under this layout.
    pub fn pauses(&self) -> bool {
        self.pattern == Pattern::Pauses
    }

    /// Returns true if each model has the same part in both layouts, and batches pause in both or in none.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let sorted = |layout: &Self| {
            let mut parts = layout.parts.clone();
            parts.sort_unstable();
            parts
        };
        (self.pattern == Pattern::AtRest) == (other.pattern == Pattern::AtRest)
            && self.pauses() == other.pauses()
            && sorted(self) == sorted(other)
    }

    /// Returns the same layout with new model indices.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize>) -> Self {
        let parts = self.parts.iter().filter_map(|&(model, part)| Some((now(model)?, part)));
        Self { pattern: self.pattern, parts: parts.collect() }
    }
}

/// Returns the layouts that may reduce the misses of the model that violates its SLO (`beneficiary`).
/// Patterns that restrict other models least come first. The result contains neither `Everything` nor
/// `AtRest` nor `Pauses`.
///
/// The first layout of a pattern separates the violating model from the other models, or distributes
/// models by their work. Models of `all` that are not in `tenants` keep their shares. The models with
/// the highest priority get less than the whole GPU only if the violating model is one of them.
pub fn candidates(
    tenants: &[LayoutTenant],
    all: &[LayoutTenant],
    beneficiary: Option<LayoutTenant>,
) -> Vec<Layout> {
    let is_active = |tenant: &&LayoutTenant| tenant.work >= MATTERS;
    let active: Vec<LayoutTenant> = tenants.iter().filter(is_active).copied().collect();
    let first = all.iter().filter(is_active).map(|tenant| tenant.priority).min();
    let is_first = |tenant: &LayoutTenant| Some(tenant.priority) <= first;
    let (firsts, lower): (Vec<LayoutTenant>, Vec<LayoutTenant>) =
        tenants.iter().partition(|tenant| is_first(tenant));
    let lower_active = active.iter().filter(|tenant| !is_first(tenant)).count();
    let mut found = Vec::new();
    let mut add = |when: bool, pattern: Pattern, parts: Vec<(usize, GpuPart)>| {
        if when && !parts.is_empty() {
            found.push(Layout::new(pattern, parts));
        }
    };
    let of_lower = beneficiary.filter(|model| !is_first(model));
    add(lower_active >= 2 && of_lower.is_some(), Pattern::LowerHalves, one_alone(&lower, of_lower));
    for halves in halves(&lower) {
        add(lower_active >= 2, Pattern::LowerHalves, halves);
    }
    add(lower_active >= 1, Pattern::LowerHalf, lower.iter().map(|tenant| (tenant.model, HALF)).collect());
    for own in [GpuPart::new(0, 1, 2), GpuPart::new(0, 1, 3), GpuPart::new(0, 1, 4)] {
        let alone: Vec<LayoutTenant> = beneficiary.into_iter().collect();
        add(active.len() >= 2, Pattern::Apart(own), apart(&alone, tenants, own));
    }
    for own in [GpuPart::new(0, 1, 2), GpuPart::new(0, 1, 3), GpuPart::new(0, 2, 3), GpuPart::new(0, 1, 4)] {
        add(lower_active >= 1, Pattern::FirstApart(own), apart(&firsts, tenants, own));
    }
    for halves in halves(tenants) {
        add(active.len() >= 3, Pattern::Halves, halves);
    }
    add(active.len() >= 4, Pattern::Thirds, balanced(tenants, 3));
    add(active.len() >= 2, Pattern::OwnParts, own_parts(&active));
    let for_first = beneficiary.is_some_and(|model| is_first(&model));
    let mut different: Vec<Layout> = Vec::new();
    for layout in found.into_iter().filter(|layout| for_first || !layout.confines_first()) {
        if !different.iter().any(|other| other.is_same(&layout)) {
            different.push(layout);
        }
    }
    different
}

/// Assigns the part `own` at the start of the GPU to the models of `inside`, and the rest of the GPU to
/// all other models.
fn apart(inside: &[LayoutTenant], all: &[LayoutTenant], own: GpuPart) -> Vec<(usize, GpuPart)> {
    let is_inside = |model: usize| inside.iter().any(|tenant| tenant.model == model);
    let place =
        |tenant: &LayoutTenant| (tenant.model, if is_inside(tenant.model) { own } else { own.rest() });
    if inside.is_empty() || inside.len() == all.len() { Vec::new() } else { all.iter().map(place).collect() }
}

/// Assigns the first half of the GPU to one model, and the second half to all other models.
fn one_alone(tenants: &[LayoutTenant], alone: Option<LayoutTenant>) -> Vec<(usize, GpuPart)> {
    let is_alone = |tenant: &LayoutTenant| alone.is_some_and(|alone| alone.model == tenant.model);
    tenants.iter().map(|tenant| (tenant.model, if is_alone(tenant) { HALF.rest() } else { HALF })).collect()
}

/// Returns distributions of the models over two halves. The first distribution balances the work. For
/// up to [`MAX_SPLIT_MODELS`] models, all other distributions follow.
fn halves(tenants: &[LayoutTenant]) -> Vec<Vec<(usize, GpuPart)>> {
    let ways = if tenants.len() <= MAX_SPLIT_MODELS { 1_u8 << tenants.len().saturating_sub(1) } else { 0 };
    // The last model is always in the first half. This excludes mirror images and an empty half.
    let way = |way: u8| {
        let place = |(at, tenant): (usize, &LayoutTenant)| (tenant.model, GpuPart::new(way >> at & 1, 1, 2));
        tenants.iter().enumerate().map(place).collect()
    };
    std::iter::once(balanced(tenants, 2)).chain((1..ways).map(way)).collect()
}

/// Distributes models over `of` equal pieces. The model with the most work comes first, and each model
/// goes to the piece with the least work.
fn balanced(tenants: &[LayoutTenant], of: u8) -> Vec<(usize, GpuPart)> {
    let mut loads = vec![0.0_f64; usize::from(of)];
    let place = |tenant: &LayoutTenant| {
        let least =
            (0..of).min_by(|&one, &other| loads[usize::from(one)].total_cmp(&loads[usize::from(other)]));
        let piece = least.unwrap_or(0);
        // The work of each model counts as at least a small minimum. Otherwise all models without work
        // would go to the same piece.
        loads[usize::from(piece)] += tenant.work.max(MATTERS / 10.0);
        (tenant.model, GpuPart::new(piece, 1, of))
    };
    by_work(tenants).iter().map(place).collect()
}

/// Divides the GPU by work. Each model starts with an eighth. The model with the most work relative to
/// its part gets a part of twice the size, until no part can be doubled. The parts lie side by side,
/// with the largest first. Returns an empty list if there are more models than eighths.
fn own_parts(active: &[LayoutTenant]) -> Vec<(usize, GpuPart)> {
    let order = by_work(active);
    let mut eighths = vec![1_u8; order.len()];
    loop {
        let Some(free) = EIGHTHS.checked_sub(eighths.iter().sum()) else { return Vec::new() };
        let load = |at: usize| order[at].work / f64::from(eighths[at]);
        let may_double = (0..order.len()).filter(|&at| eighths[at] <= free && 2 * eighths[at] < EIGHTHS);
        let Some(most) = may_double.max_by(|&one, &other| load(one).total_cmp(&load(other))) else { break };
        eighths[most] *= 2;
    }
    let mut sizes: Vec<(usize, u8)> = order.iter().map(|tenant| tenant.model).zip(eighths).collect();
    sizes.sort_by_key(|&(_, size)| std::cmp::Reverse(size));
    let mut first = 0;
    let place = |(model, size): (usize, u8)| {
        first += size;
        (model, GpuPart::new(first / size - 1, 1, EIGHTHS / size))
    };
    sizes.into_iter().map(place).collect()
}

fn by_work(tenants: &[LayoutTenant]) -> Vec<LayoutTenant> {
    let mut order = tenants.to_vec();
    order.sort_by(|one, other| other.work.total_cmp(&one.work).then(one.model.cmp(&other.model)));
    order
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::groups::{Division, Groups};
    use shadowslice_shared::units::Sms;

    use super::*;

    fn tenant(model: usize, priority: u32, work: f64) -> LayoutTenant {
        LayoutTenant { model, priority, work }
    }

    /// Returns the layouts that may reduce the misses of the first model.
    fn tried(tenants: &[LayoutTenant]) -> Vec<Layout> {
        candidates(tenants, tenants, tenants.first().copied())
    }

    fn found(tenants: &[LayoutTenant], pattern: Pattern) -> Layout {
        tried(tenants).into_iter().find(|layout| layout.pattern == pattern).unwrap()
    }

    #[test]
    fn a_model_alone_or_beside_idle_ones_has_nothing_to_try() {
        assert_eq!(tried(&[]), []);
        assert_eq!(tried(&[tenant(0, 1, 0.9)]), []);
        assert_eq!(tried(&[tenant(0, 1, 0.9), tenant(1, 1, 0.0)]), []);
    }

    #[test]
    fn beside_a_hog_of_a_lower_priority_it_is_the_hog_that_gets_less() {
        let two = [tenant(0, 1, 0.2), tenant(1, 3, 0.9)];
        let half = &tried(&two)[0];
        assert_eq!(half.pattern, Pattern::LowerHalf);
        assert_eq!((half.part_of(0), half.part_of(1)), (GpuPart::WHOLE, GpuPart::new(1, 1, 2)));
        let third = found(&two, Pattern::Apart(GpuPart::new(0, 1, 3)));
        assert_eq!((third.part_of(0), third.part_of(1)), (GpuPart::new(0, 1, 3), GpuPart::new(1, 2, 3)));
    }

    #[test]
    fn the_first_priority_is_everywhere_while_the_others_share_two_halves_by_work() {
        let five =
            [tenant(0, 1, 0.5), tenant(1, 1, 0.3), tenant(2, 2, 0.6), tenant(3, 2, 0.4), tenant(4, 3, 0.3)];
        let layout = &tried(&five)[0];
        assert_eq!(layout.pattern, Pattern::LowerHalves);
        assert_eq!([0, 1].map(|model| layout.part_of(model)), [GpuPart::WHOLE; 2]);
        assert_ne!(layout.part_of(2), layout.part_of(3));
        assert_eq!(layout.part_of(3), layout.part_of(4), "0.4 and 0.3 beside 0.6");
        let first = found(&five, Pattern::FirstApart(GpuPart::new(0, 1, 4)));
        assert_eq!([0, 1, 2, 3].map(|model| first.part_of(model).fraction()), [0.25, 0.25, 0.75, 0.75]);
    }

    #[test]
    fn the_first_priority_is_not_confined_for_a_lower_one() {
        let three = [tenant(0, 1, 0.4), tenant(1, 2, 0.4), tenant(2, 2, 0.4)];
        let confines =
            |model: usize| candidates(&three, &three, Some(three[model])).iter().any(Layout::confines_first);
        assert!(confines(0) && !confines(1));
    }

    #[test]
    fn a_violating_model_of_a_lower_priority_has_a_half_without_the_other_lower_ones() {
        let four = [tenant(0, 1, 0.1), tenant(1, 2, 0.6), tenant(2, 2, 0.3), tenant(3, 3, 0.4)];
        let layout = &candidates(&four, &four, Some(four[2]))[0];
        assert_eq!(layout.pattern, Pattern::LowerHalves);
        let (own, other) = (GpuPart::new(0, 1, 2), GpuPart::new(1, 1, 2));
        assert_eq!([0, 1, 2, 3].map(|model| layout.part_of(model)), [GpuPart::WHOLE, other, own, other]);
    }

    #[test]
    fn an_own_part_is_as_large_as_its_work() {
        let three = [tenant(0, 1, 0.3), tenant(1, 1, 0.8), tenant(2, 1, 0.3)];
        let own = found(&three, Pattern::OwnParts);
        let quarters = [GpuPart::new(2, 1, 4), GpuPart::new(0, 1, 2), GpuPart::new(3, 1, 4)];
        assert_eq!([0, 1, 2].map(|model| own.part_of(model)), quarters);
    }

    #[test]
    fn up_to_eight_models_have_parts_side_by_side() {
        for models in 2..=8_usize {
            let all: Vec<LayoutTenant> =
                (0..models).map(|model| tenant(model, 1, 0.05 + 0.1 * model as f64)).collect();
            let own = found(&all, Pattern::OwnParts);
            let sum: f64 = (0..models).map(|model| own.part_of(model).fraction()).sum();
            assert!((0.7..=1.0).contains(&sum), "{models} models have {sum}");
            let division = Division::of(Sms(128)).unwrap();
            let groups = (0..models).map(|model| division.groups_in(own.part_of(model)));
            let all = groups.clone().fold(Groups::NONE, Groups::union);
            assert_eq!(groups.map(Groups::count).sum::<usize>(), all.count(), "none overlaps");
        }
        let nine: Vec<LayoutTenant> = (0..9).map(|model| tenant(model, 1, 0.5)).collect();
        assert!(tried(&nine).iter().all(|layout| layout.pattern != Pattern::OwnParts));
    }
}
