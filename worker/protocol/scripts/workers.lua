-- The records of the workers that have reported lately, by name. ARGV: retention.

local records = {}
for _, name in ipairs(call('ZRANGEBYSCORE', K.workers, '(' .. seconds(now_us), '+inf')) do
  records[#records + 1] = call('GET', K.worker .. name) or nil
end
return records
