//! Groups of SMs. A partition inside a worker process consists of one or more groups.
//!
//! All processes divide the SMs of a GPU in the same way into groups of [`GROUP_SMS`] SMs. The
//! remaining SMs form one more group. Partitions without a common group have no common SM.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::{Percent, Sms};

/// The number of SMs in a group. CUDA divides a Hopper GPU into groups of 8 SMs, so that a cluster of
/// thread blocks fits into one group.
pub const GROUP_SMS: u32 = 8;

/// The maximum number of groups of a GPU. [`Groups`] has one bit for each group. The largest GPUs have
/// about 20 groups.
pub const MAX_GROUPS: usize = 64;

/// The maximum number of partitions that a worker keeps ready at a time, in addition to the whole GPU.
pub const READY_PARTITIONS: usize = 4;

/// A partition: a set of a GPU's groups, with one bit for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Groups(u64);

impl Groups {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// All groups of any GPU. Batches with this partition use all SMs that their process is allowed to
    /// use.
    pub const WHOLE: Self = Self(u64::MAX);

    /// Returns the first `count` groups.
    pub fn first(count: usize) -> Self {
        (0..count).collect()
    }

    /// Returns whether the set contains this group.
    pub fn contains(self, group: usize) -> bool {
        group < MAX_GROUPS && self.0 & (1 << group) != 0
    }

    /// Returns the set with this group added.
    #[must_use]
    pub fn with(self, group: usize) -> Self {
        debug_assert!(group < MAX_GROUPS, "a GPU has at most {MAX_GROUPS} groups");
        Self(self.0 | (1 << (group % MAX_GROUPS)))
    }

    /// Returns whether the set is one contiguous run of groups. A GPU with n groups has n (n + 1) / 2
    /// such sets.
    pub fn is_run(self) -> bool {
        let from_first = self.0.checked_shr(self.0.trailing_zeros()).unwrap_or(0);
        from_first != 0 && from_first & from_first.wrapping_add(1) == 0
    }

    /// Returns the number of groups in the set.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns the groups that are in both sets.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the groups that are in at least one of the sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the groups of this set that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the indices of the groups in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MAX_GROUPS).filter(move |&group| self.contains(group))
    }

    /// Returns the set as a bit mask. Bit `n` stands for group `n`.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the set for a bit mask from [`bits`](Self::bits).
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

impl FromIterator<usize> for Groups {
    fn from_iter<I: IntoIterator<Item = usize>>(groups: I) -> Self {
        groups.into_iter().fold(Self::NONE, Self::with)
    }
}

impl fmt::Display for Groups {
    /// Writes ranges such as `0-3,7`. Writes `all` for the whole GPU, and `none` for the empty set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::WHOLE => return f.write_str("all"),
            Self::NONE => return f.write_str("none"),
            _ => {}
        }
        let mut separator = "";
        let mut group = 0;
        while group < MAX_GROUPS {
            let length = (group..MAX_GROUPS).take_while(|&group| self.contains(group)).count();
            match length {
                0 => {}
                1 => write!(f, "{separator}{group}")?,
                _ => write!(f, "{separator}{group}-{}", group + length - 1)?,
            }
            if length > 0 {
                separator = ",";
            }
            group += length + 1;
        }
        Ok(())
    }
}

impl FromStr for Groups {
    type Err = ParseGroupsError;

    /// Parses the format of the [`Display`](fmt::Display) implementation.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => return Ok(Self::WHOLE),
            "none" => return Ok(Self::NONE),
            _ => {}
        }
        let group =
            |text: &str| text.parse().ok().filter(|&group| group < MAX_GROUPS).ok_or(ParseGroupsError);
        let mut groups = Self::NONE;
        for run in text.split(',') {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            groups = (group(first)?..=group(last)?).fold(groups, Self::with);
        }
        Ok(groups)
    }
}

/// The error for a text that is not a set of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid set of SM groups; use for example 0-3,7")]
pub struct ParseGroupsError;

/// A part of a GPU that a layout assigns to a model. The GPU is divided into equal pieces, and a part
/// consists of one or more contiguous pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuPart {
    first: u8,
    count: u8,
    of: u8,
}

impl fmt::Display for GpuPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.count, self.of) {
            (1, 1) => "the whole GPU",
            (1, 2) => "one half",
            (1, 3) => "one third",
            (2, 3) => "two thirds",
            (1, 4) => "one quarter",
            (3, 4) => "three quarters",
            (1, 8) => "one eighth",
            _ => return write!(f, "{} of {} pieces", self.count, self.of),
        })
    }
}

impl GpuPart {
    /// The whole GPU.
    pub const WHOLE: Self = Self { first: 0, count: 1, of: 1 };

    /// Returns a part of a GPU that is divided into `of` equal pieces. The part consists of `count`
    /// pieces, starting with the piece at index `first`.
    ///
    /// # Panics
    ///
    /// Panics if `count` is 0 or if the part extends past the last piece.
    pub const fn new(first: u8, count: u8, of: u8) -> Self {
        assert!(count > 0 && first + count <= of, "a part lies within its GPU");
        Self { first, count, of }
    }

    /// Returns all parts that layouts use, except the whole GPU. These are all halves, thirds, quarters
    /// and eighths, the first and last two thirds, and the first and last three quarters.
    pub fn family() -> impl Iterator<Item = Self> {
        let pieces = [2, 3, 4, 8].into_iter();
        let pieces = pieces.flat_map(|of| (0..of).map(move |first| Self::new(first, 1, of)));
        let rests = (3..=4).flat_map(|of| (0..2).map(move |first| Self::new(first, of - 1, of)));
        pieces.chain(rests)
    }

    /// Returns the part of the GPU outside this part, which must lie at one end of the GPU.
    pub const fn rest(self) -> Self {
        let first = if self.first == 0 { self.count } else { 0 };
        Self { first, count: self.of - self.count, of: self.of }
    }

    /// Returns the size of the part as a fraction of the GPU, above 0 and at most 1.
    pub fn fraction(self) -> f64 {
        f64::from(self.count) / f64::from(self.of)
    }
}

/// The division of a GPU into groups: the number of SMs in each group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Division(Vec<Sms>);

impl Division {
    /// Returns a division into groups of these sizes. Returns `None` for more than [`MAX_GROUPS`]
    /// groups. Also returns `None` for fewer than two groups, because partitions need at least two.
    pub fn new(sizes: Vec<Sms>) -> Option<Self> {
        (2..=MAX_GROUPS).contains(&sizes.len()).then_some(Self(sizes))
    }

    /// Returns the division of a GPU with `total` SMs into groups of [`GROUP_SMS`]. A last group takes
    /// the remainder. The driver of a real GPU may divide the GPU differently: the last group can have
    /// more SMs than the other groups (12 on an H100).
    pub fn of(total: Sms) -> Option<Self> {
        let mut sizes = vec![Sms(GROUP_SMS); (total.0 / GROUP_SMS) as usize];
        sizes.extend(Some(Sms(total.0 % GROUP_SMS)).filter(|rest| rest.0 > 0));
        Self::new(sizes)
    }

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of SMs in each group.
    pub fn sizes(&self) -> &[Sms] {
        &self.0
    }

    /// Returns the total number of SMs in all groups.
    pub fn total(&self) -> Sms {
        Sms(self.0.iter().map(|sms| sms.0).sum())
    }

    /// Returns the groups of a part. The result has at least one group. It is [`Groups::WHOLE`] if the
    /// part covers all groups.
    pub fn groups_in(&self, part: GpuPart) -> Groups {
        let border = |piece: u8| self.count() * usize::from(piece) / usize::from(part.of);
        let first = border(part.first).min(self.count() - 1);
        let end = border(part.first + part.count).max(first + 1);
        if end - first == self.count() { Groups::WHOLE } else { (first..end).collect() }
    }

    /// Returns the total number of SMs in these groups.
    pub fn sms(&self, groups: Groups) -> Sms {
        let sizes = self.0.iter().enumerate().filter(|(group, _)| groups.contains(*group));
        Sms(sizes.map(|(_, sms)| sms.0).sum())
    }

    /// Returns the number of whole groups that fit into a share. Every share gets at least one group,
    /// and a share below 100 % never gets all groups. If several shares are each at least as large as
    /// one group and add up to at most 100 %, their groups fit on the GPU together.
    pub fn groups_of(&self, share: Percent) -> usize {
        if share == Percent::WHOLE {
            return self.count();
        }
        let sms = u64::from(self.total().0) * u64::from(share.get()) / 100;
        let fitting = usize::try_from(sms / u64::from(GROUP_SMS)).unwrap_or(0);
        fitting.clamp(1, self.count() - 1)
    }

    /// Returns the number of SMs in the groups of a share. Assumes that these groups have [`GROUP_SMS`]
    /// SMs each, although the last group of the GPU can have another size.
    pub fn sms_of(&self, share: Percent) -> Sms {
        let groups = self.groups_of(share);
        if groups == self.count() { self.total() } else { self.sms(Groups::first(groups)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(share: u32) -> Percent {
        Percent::new(share).unwrap()
    }

    #[test]
    fn contiguous_groups_are_recognised() {
        let run = |groups: &[usize]| groups.iter().copied().collect::<Groups>().is_run();
        assert!(run(&[0]) && run(&[63]) && run(&[3, 4, 5]) && Groups::WHOLE.is_run());
        assert!(!run(&[]) && !run(&[0, 2]) && !run(&[0, 1, 63]));
    }

    #[test]
    fn an_h200_has_sixteen_groups_and_the_last_one_holds_the_rest() {
        let division = Division::of(Sms(132)).unwrap();
        assert_eq!((division.count(), division.total()), (17, Sms(132)));
        let real = Division::new([vec![Sms(8); 15], vec![Sms(12)]].concat()).unwrap();
        assert_eq!((real.count(), real.total(), real.sms(Groups::WHOLE)), (16, Sms(132), Sms(132)));
        let sms = |share| real.sms_of(percent(share)).0;
        assert_eq!([1, 7, 30, 50, 96, 99, 100].map(sms), [8, 8, 32, 64, 120, 120, 132]);
    }

    #[test]
    fn shares_of_at_most_100_percent_fit_together() {
        for total in [20, 46, 80, 100, 132, 148, 160] {
            let division = Division::of(Sms(total)).unwrap();
            for first in 1..100 {
                let groups = |share| division.groups_of(percent(share));
                let room = groups(first) + groups(100 - first);
                // A share smaller than one group still gets one group.
                let small = total * first.min(100 - first) / 100 < GROUP_SMS;
                assert!(room <= division.count() + usize::from(small), "{first} % of {total} SMs");
            }
        }
    }

    #[test]
    fn a_gpu_without_two_groups_has_no_partitions() {
        assert_eq!(Division::of(Sms(8)), None);
        assert_eq!(Division::of(Sms(10)).unwrap().count(), 2);
        assert_eq!(Division::of(Sms(8 * 65)), None);
    }

    #[test]
    fn the_pieces_of_a_gpu_are_disjoint_and_cover_it() {
        for total in [20, 46, 80, 100, 132, 148, 160] {
            let division = Division::of(Sms(total)).unwrap();
            for of in [2, 3, 4, 8_u8] {
                let pieces = (0..of).map(|first| division.groups_in(GpuPart::new(first, 1, of)));
                let all = pieces.clone().fold(Groups::NONE, Groups::union);
                assert!(pieces.clone().all(|piece| piece != Groups::NONE && piece.is_run()));
                if division.count() >= usize::from(of) {
                    assert_eq!(pieces.map(Groups::count).sum::<usize>(), division.count());
                    assert_eq!(all, Groups::first(division.count()));
                }
            }
            assert_eq!(division.groups_in(GpuPart::WHOLE), Groups::WHOLE);
        }
        assert_eq!(GpuPart::new(0, 1, 4).rest(), GpuPart::new(1, 3, 4));
        assert_eq!(GpuPart::new(2, 1, 3).rest(), GpuPart::new(0, 2, 3));
        let h200 = Division::new([vec![Sms(8); 15], vec![Sms(12)]].concat()).unwrap();
        let parts: Vec<String> = GpuPart::family().map(|part| h200.groups_in(part).to_string()).collect();
        assert_eq!(
            parts.join(" "),
            "0-7 8-15 0-4 5-9 10-15 0-3 4-7 8-11 12-15 0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15 0-9 5-15 0-11 4-15"
        );
    }

    #[test]
    fn sets_are_shown_as_ranges() {
        let set: Groups = [0, 1, 2, 5, 62, 63].into_iter().collect();
        assert_eq!(set.to_string(), "0-2,5,62-63");
        for set in [set, Groups::WHOLE, Groups::NONE, Groups::first(1)] {
            assert_eq!(set.to_string().parse(), Ok(set));
        }
        for wrong in ["", "x", "3-", "0,,1", "64", "0-64"] {
            assert_eq!(wrong.parse::<Groups>(), Err(ParseGroupsError), "{wrong}");
        }
        assert_eq!((Groups::WHOLE.to_string(), Groups::NONE.to_string()), ("all".into(), "none".into()));
        assert_eq!(set.common(Groups::first(6)).iter().collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert_eq!(Groups::from_bits(set.bits()), set);
        assert_eq!((set.count(), Groups::first(3).count()), (6, 3));
    }
}
