-- The gateways that share this Redis, each with the time until which its word counts.
-- KEYS[1] all of them, by that time. ARGV: ttl_ms, own word (empty: none), whether it leaves, most
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[1], ARGV[2])
elseif ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[1], now_ms + ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], 2 * ARGV[1])
end
return {now_ms, unpack(redis.call('ZRANGE', KEYS[1], -ARGV[4], -1))}
