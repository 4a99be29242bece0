//! Plans how a model trains on the hardware at hand, lowers it to a Program and predicts memory and time
