//! For how long what was found out is taken for true.

/// The first time, in seconds; each time that it is found out again twice as long,
const FIRST_S: f64 = 120.0;

/// up to this: who is so now and then is to come to rest.
const LONGEST_S: f64 = 3_600.0;

/// How often something was found out.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lasting {
    times: i32,
}

impl Lasting {
    /// It is found out once more: for so many seconds it is taken for true.
    pub(super) fn again(&mut self) -> f64 {
        let seconds = (FIRST_S * 2_f64.powi(self.times)).min(LONGEST_S);
        self.times = self.times.saturating_add(1);
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_twice_as_long_each_time_up_to_an_hour() {
        let mut lasting = Lasting::default();
        assert_eq!(
            [(); 7].map(|()| lasting.again()),
            [120.0, 240.0, 480.0, 960.0, 1_920.0, 3_600.0, 3_600.0]
        );
        assert!((0..10_000).all(|_| lasting.again() == 3_600.0));
    }
}
