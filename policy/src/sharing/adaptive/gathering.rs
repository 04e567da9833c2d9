//! Intervals of few requests, taken together until they say something.
//!
//! Who is asked for a few requests a second, each of which is urgent, suffers as much from neighbours as who is asked for hundreds; it only
//! takes longer to tell.

use std::collections::BTreeMap;

use super::trials::Class;

/// For so many seconds at most: what was long ago says nothing of now.
const WITHIN_S: f64 = 60.0;

/// What was seen of priorities of which nothing can be said yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Gathering(BTreeMap<u32, Class>);

impl Gathering {
    /// Those of these of which something can be said after an interval, with what was seen before; or not within so long.
    pub(super) fn add(&mut self, classes: &[Class]) -> Vec<Class> {
        let enough = |class: &Class| {
            let before = self.0.remove(&class.priority);
            let class = before.map_or(*class, |before| class.after(&before));
            if class.tells() || class.seconds >= WITHIN_S {
                return Some(class);
            }
            self.0.insert(class.priority, class);
            None
        };
        classes.iter().filter_map(enough).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tally::Tally;
    use super::*;

    /// Half a second in which so many requests of the first priority came, a tenth of them too late.
    fn came(arrived: f64) -> Class {
        let (seen, allowed) = (Tally { arrived, missed: arrived / 10.0 }, arrived / 100.0);
        Class { priority: 1, seconds: 0.5, load: 0.1, seen, allowed, can_be_helped: true, ..Class::default() }
    }

    #[test]
    fn few_requests_wait_for_others_and_many_do_not() {
        let mut gathering = Gathering::default();
        assert_eq!(gathering.add(&[came(20.0)]), [came(20.0)]);
        assert_eq!(gathering.add(&[came(10.0)]), []);
        let [both] = gathering.add(&[came(10.0)])[..] else { panic!("twenty are enough") };
        assert_eq!(both, Class { seconds: 1.0, ..came(20.0) });
        assert_eq!(gathering.add(&[came(19.0)]), [], "what was told is not told again");
    }

    #[test]
    fn each_priority_for_itself() {
        let mut gathering = Gathering::default();
        let third = Class { priority: 3, ..came(500.0) };
        for _ in 0..2 {
            assert_eq!(gathering.add(&[came(8.0), third]), [third]);
        }
        assert_eq!(gathering.add(&[came(8.0), third]).len(), 2);
    }

    #[test]
    fn who_cannot_be_helped_in_one_of_them_cannot() {
        let mut gathering = Gathering::default();
        gathering.add(&[Class { can_be_helped: false, ..came(10.0) }]);
        assert!(!gathering.add(&[came(10.0)])[0].can_be_helped);
    }

    #[test]
    fn what_came_to_those_below_meanwhile_counts_with_it() {
        let mut gathering = Gathering::default();
        let beside = |arrived, missed| Class { below: Tally { arrived, missed }, ..came(10.0) };
        gathering.add(&[beside(100.0, 5.0)]);
        assert_eq!(gathering.add(&[beside(50.0, 1.0)])[0].below, Tally { arrived: 150.0, missed: 6.0 });
    }

    #[test]
    fn what_takes_too_long_says_nothing() {
        let mut gathering = Gathering::default();
        let told = (1..).find_map(|intervals| {
            let told = gathering.add(&[came(0.1)]);
            told.first().map(|class| (intervals, class.tells()))
        });
        assert_eq!(told, Some((120, false)));
    }
}
